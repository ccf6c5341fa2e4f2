"""Maps of what sparse layers did: loads of experts, entropy, drops, depth, by layer and step."""

import math

import numpy as np

from ats_jax.report.figures import Heat
from ats_jax.report.read import RunRecord

MAPS = (
  ("moe/layer_entropy", "Entropy of the routers", "Of a token's probabilities, by layer.", "nats"),
  ("moe/layer_dropped", "Dropped choices", "Share of choices without a place, by layer.", "share"),
  ("moe/layer_tokens", "Tokens of the layers with experts", "By layer.", "tokens"),
  ("mod/layer_routed", "Depth", "Share of tokens that go through each layer which skips some.",
   "share"),
  ("mod/layer_overflow", "Depth without a place", "Share of tokens that were chosen but had none.",
   "share"),
)  # fmt: skip
MOST_ROWS = 128  # of a map of experts by step


def heat_maps(run: RunRecord, most: int) -> list[Heat]:
  """What sparse layers did, by layer (those of a kind, from the bottom up) and step.

  Args:
    run: the run.
    most: columns of a map.
  """
  found: list[Heat] = []
  if "moe/load" in run.layers:
    found += _loads(*run.layers["moe/load"], most)
  for name, title, about, unit in MAPS:
    if name in run.layers:
      steps, values = run.layers[name]
      kind = "MoE" if name.startswith("moe/") else "MoD"
      rows = tuple(f"{kind} layer {i}" for i in range(values.shape[1]))
      if np.nan_to_num(values).any():  # a map of zeros shows nothing
        found.append(_heat(title, about, unit, rows, steps, values, most))
  if "mod/depths" in run.layers:
    steps, values = run.layers["mod/depths"]
    rows = tuple(f"{i} of them" for i in range(values.shape[1]))
    about = "Share of tokens by the number of skipping layers that they went through."
    found.append(_heat("Tokens by depth", about, "share", rows, steps, values, most))
  read = max((len(column.steps) for column in run.layers.values()), default=0)
  if run.layer_rows > read:
    note = f" {read} of {run.layer_rows:,} rows of layers.jsonl were read, evenly spaced."
    found = [one._replace(about=one.about + note) for one in found]
  return found


def _loads(steps: np.ndarray, loads: np.ndarray, most: int) -> list[Heat]:
  """The load of experts [steps, layers, experts], relative to an even one."""
  even = loads * loads.shape[2]
  layers, experts = even.shape[1:]
  names = tuple(f"MoE layer {i}" for i in range(layers))
  unit = "times the even share"
  found = [
    _heat("Fullest expert", "Load of the fullest expert of each layer; 1 is even.", unit, names,
          steps, even.max(2), most),
    _heat("Emptiest expert", "Load of the emptiest expert of each layer; 0 is a dead one.", unit,
          names, steps, even.min(2), most),
  ]  # fmt: skip
  if layers * experts <= MOST_ROWS:
    rows = tuple(f"{name}, expert {j}" for name in names for j in range(experts))
    about = "By layer and expert; 1 is even."
    every = even.reshape(len(steps), -1)
    found.append(_heat("Load of each expert", about, unit, rows, steps, every, most))
  last = even[-max(1, len(even) // 10) :].mean(0)
  about = "Mean of the last tenth of the rows, by layer and expert; 1 is even."
  found.append(
    Heat("Load at the end", about, unit, tuple(range(experts)), names, _cells(last), "expert")
  )
  return found


def _heat(
  title: str,
  about: str,
  unit: str,
  rows: tuple[str, ...],
  steps: np.ndarray,
  values: np.ndarray,
  most: int,
) -> Heat:
  """A map of values [steps, rows] in at most so many columns, which are means of neighbours."""
  parts = np.array_split(np.arange(len(steps)), min(len(steps), most))
  means = np.stack([values[part].mean(0) for part in parts], axis=1)
  return Heat(title, about, unit, tuple(int(steps[part[-1]]) for part in parts), rows,
              _cells(means))  # fmt: skip


def _cells(values: np.ndarray) -> tuple[tuple[float | None, ...], ...]:
  """The values of a map in three digits."""
  digits = lambda value: float(f"{value:.3g}") if math.isfinite(value) else None
  return tuple(tuple(map(digits, row)) for row in values.tolist())
