"""Which metrics a report shows, and which of them together."""

from collections.abc import Mapping
from typing import NamedTuple


class Plot(NamedTuple):
  """Metrics that are one figure.

  Attributes:
    title: of the figure.
    about: what it shows and what to look for.
    unit: of the values.
    names: name of a metric -> name of its line.
    levels: the same of metrics that a run has one value of: lines across the whole plot.
    marks: whether decisions and resumed starts are marked.
    shades: whether phases of the learning rate are shaded.
    log: whether the axis may be logarithmic.
  """

  title: str
  about: str
  unit: str
  names: Mapping[str, str]
  levels: Mapping[str, str] = {}
  marks: bool = False
  shades: bool = False
  log: bool = False


NATS = "nats a token"
PLOTS = (
  Plot(
    "Loss",
    "Cross-entropy; level lines are that of simple models of the same text, on the validation "
    "split. Shaded are phases of the learning rate; vertical lines are decisions of the "
    "orchestrator and resumed starts.",
    NATS,
    {"train/loss": "training", "eval/loss": "validation"},
    levels={"eval/bigram_loss": "bigram model", "eval/unigram_loss": "unigram model"},
    marks=True,
    shades=True,
    log=True,
  ),
  Plot(
    "Learning rate",
    "What multiplied the update, and what the schedule alone would have.",
    "",
    {"train/learning_rate": "applied", "train/scheduled_rate": "scheduled"},
    marks=True,
    shades=True,
  ),
  Plot(
    "Norms of gradient and update",
    "Global norms: of the gradient before clipping, and of the change to the weights.",
    "",
    {"train/grad_norm": "gradient", "train/update_norm": "update"},
    marks=True,
    log=True,
  ),
  Plot("Norm of the weights", "Global norm after the update.", "", {"train/param_norm": "weights"}),
  Plot(
    "Reflex",
    "How far loss and gradients were from what is usual, in standard deviations.",
    "sigmas",
    {"reflex/z_loss": "loss", "reflex/z_grad": "largest of all gradients"},
    marks=True,
  ),
  Plot(
    "What the reflex did",
    "Factors on gradients and rate: 1 where nothing was limited. Left out is 1 for an update that "
    "was not made.",
    "",
    {
      "reflex/grad_scale": "factor on gradients",
      "reflex/rate_scale": "factor on the rate",
      "reflex/skipped": "left out",
    },
  ),
  Plot(
    "Speed",
    "All devices together, without compilation, evaluations and checkpoints.",
    "tokens/s",
    {"train/tokens_per_sec": "tokens/s"},
  ),
  Plot(
    "Utilisation",
    "Model FLOP/s as a share of the devices' peak.",
    "share",
    {"train/mfu": "MFU", "train/mfu_6n": "by 6N + 12LdS"},
  ),
  Plot(
    "Memory",
    "Of the fullest device, and of the main process.",
    "GiB",
    {
      "memory/device_in_use_gib": "device, in use",
      "memory/device_peak_gib": "device, most so far",
      "memory/device_reserved_gib": "device, reserved",
      "memory/device_limit_gib": "device, limit",
      "memory/host_rss_gib": "host process",
    },
  ),
)
_SHOWN = {name for plot in PLOTS for name in plot.names} | {"train/tflops_per_device"}
_FAMILIES = ("train/", "reflex/", "memory/")  # most of a row; of them no others are shown
_OF_SOURCES = ("/loss", "/epochs")


def is_shown(name: str) -> bool:
  """Whether a report may show a metric; others need not be read."""
  return name in _SHOWN or not name.startswith(_FAMILIES) or name.endswith(_OF_SOURCES)
