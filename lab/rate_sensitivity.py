r"""How much a loss depends on the learning rate, with gradient clipping alone and with a guard.

The protocol of Wortsman et al. 2023 (arXiv:2309.14322) at a smaller scale: a decoder without a norm
of queries and keys is trained at peak rates from 3e-4 to 3e-1, by AdamW with a linear warm-up over
a twentieth of the run, a cosine decay to nothing, decay of weights that does not depend on the rate
and a loss on the logarithm of the softmax's denominator. The sensitivity is the mean over the rates
of min(loss, loss of the first weights), less the loss at the best rate; of losses on held-out text.

Text, rows, arms and scoring are those of `lab.faults`, whose suites of long runs give the settings
of all sizes but `toy`: rows of 512 bytes in batches of 16, bfloat16, and what the orchestrator has
by default. `toy` is the model of the short suites. Each run appends a line of JSON to the results,
and the same command goes on where it was stopped.

python -m lab.rate_sensitivity run --sizes=26m,110m --results=runs/rates.jsonl \
  [--rates=3e-4,1e-3] [--arms=clip,ours] [--seeds=0] [--steps=1000] [--check_interval=100]
python -m lab.rate_sensitivity table --results=runs/rates.jsonl
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags, logging

from ats_jax.cluster import runtime
from ats_jax.config import base_config, from_config_dict
from ats_jax.sharding.mesh import make_mesh
from ats_jax.verbs import cli
from lab.faults.arms import ARMS, OURS, How
from lab.faults.bench import Bench, Suite
from lab.faults.course import run
from lab.faults.results import Record, Results, mend
from lab.faults.suite import ON_GPU
from lab.faults.table import CLEAN, USUAL, markdown, mean, number, spike_scores

_SIZES = flags.DEFINE_list("sizes", ["26m"], "Of the model: toy, 10m, 26m or 110m.")
_RATES = flags.DEFINE_list(
  "rates", ["3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "1e-1", "3e-1"], "Peak learning rates."
)
_ARMS = flags.DEFINE_list("arms", [USUAL, OURS], "Arms of lab.faults.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Of weights and data.")
_STEPS = flags.DEFINE_integer("steps", 1000, "Of each run.", lower_bound=100)
_EVERY = flags.DEFINE_integer(
  "check_interval", None, "Updates between two looks; by default those of the size.", lower_bound=1
)
_RESULTS = flags.DEFINE_string("results", None, "File of JSON lines.")

PROTOCOL = 1  # raise it when settings or scoring change
KEY = ("size", "rate", "arm", "seed")
DECAY = 1e-4  # of weights in a step at the peak, at any rate
Settings = tuple[tuple[str, int | float | str | None], ...]


def _of_size(layers: int, width: int, heads: int, d_ff: int) -> Settings:
  shape = {"num_layers": layers, "d_model": width, "num_heads": heads, "num_kv_heads": heads}
  return (*ON_GPU, *((f"model.{name}", x) for name, x in (shape | {"d_ff": d_ff}).items()))


SIZES: dict[str, Settings] = {
  "toy": (),
  "10m": _of_size(6, 384, 6, 1024),
  "26m": ON_GPU,
  "110m": _of_size(16, 768, 12, 2048),
}


def suite(size: str, rate: float, steps: int, every: int | None = None) -> Suite:
  """A model of a size at a peak rate, and nothing that happens to it; looks `every` updates."""
  looks: Settings = tuple(
    (f"orchestrator.{name}_interval", every) for name in ("check", "snapshot") if every
  )
  of_paper: Settings = (
    ("num_steps", steps),
    ("step.z_loss", 1e-4),
    ("optimizer.learning_rate", rate),
    ("optimizer.weight_decay", DECAY / rate),
    ("optimizer.warmup_steps", steps // 20),
    ("optimizer.schedule", "cosine"),
    ("optimizer.schedule.decay_fraction", None),
    ("optimizer.schedule.final_fraction", 0.0),
  )
  return Suite((), (CLEAN,), (), (*SIZES[size], *of_paper, *looks), splits=True)


def initial_loss(bench: Bench, seed: int) -> float:
  """Held-out loss of the weights of step 0, nats."""
  return bench.score(bench.program(How()), bench.first(How(), seed), "main")[0]


def sensitivity(losses: Sequence[float], initial: float) -> float:
  """The paper's: of the losses at all rates of a grid, and of the first weights, nats."""
  return float(np.mean(np.minimum(losses, initial)) - min(losses))


def train(
  results: Results,
  keys: Iterable[tuple[str, float, str, int]],
  steps: int,
  every: int | None = None,
) -> None:
  """Make the runs that are not there; of each size and rate, those of all arms and seeds."""
  bench, of = None, None
  for key in keys:
    if key in results.records:
      continue
    size, rate, arm, seed = key
    if (size, rate) != of:
      jax.clear_caches()  # programs of other rates are not used again
      bench, of = Bench(suite(size, rate, steps, every)), (size, rate)
    assert bench is not None
    record = run(bench, arm, CLEAN, seed) | bench.made_by
    results.add(record | {"size": size, "rate": rate, "initial": initial_loss(bench, seed)})
    logging.info("%s, rate %g, %s, seed %d: loss %.4f", *key, record["loss"])


def table(records: Iterable[Record]) -> str:
  """Of each size the loss by rate and arm, mean of the seeds, and the sensitivity of each arm."""
  records = list(records)
  parts = []
  for size in dict.fromkeys(r["size"] for r in records):
    own = [r for r in records if r["size"] == size]
    arms = list(dict.fromkeys(r["arm"] for r in own))
    of = lambda arm, rate, own=own: [r for r in own if (r["arm"], r["rate"]) == (arm, rate)]
    loss = lambda arm, rate, of=of: mean(r["loss"] for r in of(arm, rate))
    rates = sorted({r["rate"] for r in own})
    rows = [[f"{rate:g}", *(number(loss(arm, rate)) for arm in arms)] for rate in rates]
    initial = mean(r["initial"] for r in own)
    found = [sensitivity([loss(arm, rate) for rate in rates], initial) for arm in arms]
    rows.append(["**sensitivity**", *map(number, found)])
    steps = ", ".join(map(str, sorted({r["steps"] for r in own})))
    head = f"{size}, {steps} steps, {initial:.3f} at first"
    parts.append(markdown([head, *arms], rows))
    lines = [[f"{rate:g}", *(spike_scores(of(arm, rate)) for arm in arms)] for rate in rates]
    parts.append(markdown([f"{size}: spike score of loss, of gradient norm, %", *arms], lines))
  return "\n\n".join(parts)


def _known(flag: str, values: list[str], known: Iterable[str]) -> list[str]:
  known = list(known)
  for value in values:
    if value not in known:
      raise ValueError(f"--{flag}={value} is unknown. Choose of: {', '.join(known)}.")
  return values


def _rates() -> list[float]:
  try:
    rates = [float(rate) for rate in _RATES.value]
  except ValueError:
    rates = [0.0]
  if min(rates) <= 0.0:
    raise ValueError(f"--rates={','.join(_RATES.value)}: give positive numbers, e.g. 3e-4,1e-3.")
  return rates


def main(argv: list[str]) -> None:
  """Train what is missing and print the table, or only print it."""
  path = Path(cli.require(_RESULTS.value, "results", "runs/rates.jsonl"))
  if argv[0] == "run":
    sizes, arms = _known("sizes", _SIZES.value, SIZES), _known("arms", _ARMS.value, ARMS)
    seeds, rates = [int(seed) for seed in _SEEDS.value], _rates()
    keys = [(z, r, a, s) for z in sizes for r in rates for a in arms for s in seeds]
    mend(path)
    cfg = from_config_dict(base_config())
    runtime.configure(cfg)
    with jax.set_mesh(make_mesh(cfg, jax.devices()[:1])):
      protocol = "-".join(str(x) for x in (PROTOCOL, _STEPS.value, _EVERY.value) if x)
      train(Results(path, protocol, KEY), keys, _STEPS.value, _EVERY.value)
  records = Results(path, fields=KEY).records
  if not records:
    raise ValueError(
      f"--results={path} holds no runs. Make some: python -m lab.rate_sensitivity run."
    )
  print(table(records.values()))


if __name__ == "__main__":
  cli.run(main, commands=("run", "table"))
