"""What the verbs do, as functions for scripts and notebooks: docs/reference/api.md shows them.

They leave the process as it was: jax's settings, the environment, handlers of signals and logs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, overload

from ats_jax.cluster import job, runtime
from ats_jax.config import Config
from ats_jax.config.extend import build
from ats_jax.config.file import load_file
from ats_jax.config.tree import updated
from ats_jax.config.validate import check_given
from ats_jax.inference.load import load_run
from ats_jax.metrics.rows import read_jsonl
from ats_jax.planner.budget import budget
from ats_jax.planner.describe import describe as plan
from ats_jax.step.state import TrainState
from ats_jax.store import paths
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train as train_run
from ats_jax.verbs import cli
from ats_jax.verbs.evaluate import evaluate_run

__all__ = ["budget", "config", "evaluate", "generate", "metrics", "plan", "train"]


def config(source: str = cli.DEFAULT_CONFIG, settings: Mapping[str, Any] | None = None) -> Config:
  """A run to make.

  Args:
    source: a config file, with a variant behind a colon, as for `--config`.
    settings: values by dotted name, e.g. {"model.num_layers": 4}.

  Raises:
    ValueError: for a file that cannot be read, an unknown name, or a value that no setting allows.
  """
  settings = settings or {}
  cfg = build(updated(load_file(source).to_dict(), settings))
  check_given(cfg, settings)
  return cfg


def train(
  cfg: Config,
  workdir: str,
  *,
  init_from: str | None = None,
  init_step: str = "latest",
  resume_step: int | None = None,
) -> TrainState:
  """Train, or go on with the run in `workdir`; Ctrl-C saves and returns.

  Args:
    cfg: of `config`.
    workdir: the folder of the run, also on a store.
    init_from: the workdir of another run, a folder of Hugging Face's or hf://OWNER/NAME of its
      Hub, whose weights a new one begins with.
    init_step: its checkpoint: a step, "latest" or "best".
    resume_step: the checkpoint to go on from in place of the newest one; later ones are set aside.

  Returns:
    The last state: `step`, the updates done; `model`, the weights.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
    FloatingPointError: if the loss or the weights stop being finite.
  """
  initial = InitialWeights.of(init_from, init_step) if init_from else None
  folder = paths.parse(workdir)
  with cli.short_log(), runtime.configured(cfg):
    job.join(cfg)
    return train_run(cfg, folder, initial, resume_step)


def evaluate(
  workdir: str,
  *,
  step: int | str = "latest",
  text: str | Sequence[str] | Mapping[str, Sequence[str]] = (),
) -> dict[str, float]:
  """Metrics of a trained run on its validation split, or on other text.

  Args:
    workdir: of the run.
    step: a step, "latest" or "best".
    text: a file, folder or glob, or several, in place of the validation split; by name, if there
      are several sets.

  Returns:
    `eval/loss` (nats per token), `eval/perplexity`, `eval/accuracy` and others.

  Raises:
    ValueError: if there is no such run, checkpoint or text.
  """
  several = (text,) if isinstance(text, str) else text
  with cli.short_log():
    return evaluate_run(paths.parse(workdir), str(step), several)[1]


@overload
def generate(
  workdir: str, prompt: str, *, step: int | str = "latest", seed: int = 0, **sampling: Any
) -> str: ...


@overload
def generate(
  workdir: str, prompt: list[str], *, step: int | str = "latest", seed: int = 0, **sampling: Any
) -> list[str]: ...


def generate(
  workdir: str,
  prompt: str | list[str],
  *,
  step: int | str = "latest",
  seed: int = 0,
  **sampling: Any,
) -> str | list[str]:
  """The prompt, or each of several, continued by a trained run.

  Args:
    workdir: of the run.
    prompt: text to continue; of several, all at once and on one device.
    step: a step, "latest" or "best".
    seed: of the draws: the same seed gives the same text.
    **sampling: in place of the run's own `sample.*`, by the names of these settings.

  Raises:
    ValueError: if there is no such run or checkpoint, or sampling is not allowed so.
  """
  devices = 0 if isinstance(prompt, str) else 1
  with cli.short_log(), load_run(paths.parse(workdir), str(step), devices=devices) as run:
    if isinstance(prompt, str):
      return prompt + "".join(run.generate(seed, prompt=prompt, **sampling))
    texts = run.continue_all(prompt, seed, **sampling)
    return [begin + rest for begin, rest in zip(prompt, texts, strict=True)]


def metrics(workdir: str) -> list[dict[str, Any]]:
  """The rows of a run's metrics.jsonl, oldest first: `step`, `wall_time` and the metrics.

  Raises:
    ValueError: if there are none.
  """
  path = paths.parse(workdir) / "metrics.jsonl"
  if not path.exists():
    raise ValueError(f"{path} is missing. Train there first, with jsonl in log.writers.")
  return read_jsonl(path)
