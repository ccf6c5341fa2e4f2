"""Coordinate check: whether updates change what a model computes by as much at any width.

Yang et al. 2022 (arXiv:2203.03466), section D.1, by role: a model is trained for some updates, and
then the parameters of one role at a time are set back to those of step 0. (Put the other way round,
trained parameters in the model of step 0 are seen through its random head, which shrinks what they
do with the root of the width.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.build import with_settings
from ats_jax.config.schema import Config
from ats_jax.config.width import settings_of_width, widened
from ats_jax.data.batch import FIELDS
from ats_jax.model.decoder import Decoder
from ats_jax.model.param import Param, is_variable, params_of
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.optimizers.base import role_name
from ats_jax.step.program import Program, make_program

# A change by a factor of 1.19 for each doubling of the width.
STEADY = 0.25
ALL = "all"


class Slope(NamedTuple):
  """How the effect of updates of a role grows with the width.

  Attributes:
    role: of the parameters; "all" = every one.
    changes: of each width, the root mean square of the change of the logits without its updates.
    slope: exponent of the width that fits them best.
  """

  role: str
  changes: tuple[float, ...]
  slope: float

  @property
  def verdict(self) -> str:
    """`steady`, `grows` or `shrinks`."""
    if abs(self.slope) <= STEADY:
      return "steady"
    return "grows" if self.slope > 0 else "shrinks"


def check_widths(
  cfg: Config, widths: Sequence[int], base_width: int, *, updates: int = 4, seeds: int = 2
) -> list[Slope]:
  """Train a config at several widths, and compare how far each role has moved the logits.

  Args:
    cfg: the config, at any width.
    widths: values of `model.d_model`.
    base_width: that `settings_of_width` takes; 0 = the settings as they are at every width.
    updates: of each model.
    seeds: whose changes are averaged.

  Raises:
    ValueError: for fewer than two widths, or as `widened` and `settings_of_width`.
  """
  if len(set(widths)) < 2:
    raise ValueError(f"--widths={','.join(map(str, widths))}: a slope needs two widths at least.")
  found: dict[str, list[float]] = {}
  for width in widths:
    wide = widened(resolve_without_data(cfg), width)
    if base_width:
      wide = with_settings(wide, settings_of_width(wide, base_width))
    sums: dict[str, float] = {}
    for seed in range(seeds):
      for role, change in _changes(_plain(wide, seed), updates).items():
        sums[role] = sums.get(role, 0.0) + change / seeds
    for role, change in sums.items():
      found.setdefault(role, []).append(change)
  fit = lambda changes: float(np.polyfit(np.log(widths), np.log(changes), 1)[0])
  return [Slope(role, tuple(changes), fit(changes)) for role, changes in found.items()]


def render_slopes(widths: Sequence[int], slopes: Sequence[Slope]) -> str:
  """A table of the changes and slopes."""
  lines = [
    "change of the logits without the updates of a role, root mean square",
    f"{'role':12}" + "".join(f"{width:>10}" for width in widths) + "     slope",
  ]
  for row in slopes:
    changes = "".join(f"{change:10.3g}" for change in row.changes)
    lines.append(f"{row.role:12}{changes}{row.slope:10.2f}  {row.verdict}")
  moving = [row.role for row in slopes if row.verdict != "steady"]
  lines.append(
    f"not steady: {', '.join(moving)} (beyond width^{STEADY:g} and width^-{STEADY:g})"
    if moving
    else f"steady: no change beyond width^{STEADY:g} or width^-{STEADY:g}"
  )
  return "\n".join(lines)


def _plain(cfg: Config, seed: int) -> Config:
  """One device, float32, the full rate from the first update on, and nothing beside the step."""
  return with_settings(
    cfg,
    {
      "seed": seed,
      "optimizer.schedule": "constant",
      "optimizer.warmup_steps": 0,
      "optimizer.warmup_fraction": 0.0,
      "orchestrator.mode": "off",
      "precision.compute_dtype": "float32",
      "precision.param_dtype": "float32",
      "precision.fp8": False,
      **{f"mesh.{axis}": 1 for axis in ("data", "fsdp", "tensor", "expert", "stage", "context")},
    },
  )


def _changes(cfg: Config, updates: int) -> dict[str, float]:
  mesh = make_mesh(cfg, jax.devices()[:1])
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    state, batch = program.init(), _rows(cfg)
    first = jax.tree.map(jnp.copy, state.model)
    logits = jax.jit(lambda model: _logits(program, model, batch))
    for _ in range(updates):
      state, _ = program.train_step(state, batch, program.training_rules(1))
    roles = sorted({role_name(param) for param in params_of(first)})
    without = {role: _with_role(state.model, first, role) for role in roles} | {ALL: first}
    rms, after = lambda x: float(jnp.sqrt(jnp.mean(jnp.square(x)))), logits(state.model)
    changes = {role: rms(after - logits(model)) for role, model in without.items()}
  # What has no effect at all, such as a role without parameters that are used, has no slope.
  return {role: change for role, change in changes.items() if change > 0}


def _rows(cfg: Config) -> dict[str, np.ndarray]:
  """A batch as the step takes it: common and rare tokens; a row's second half is its first."""
  data, rng = cfg.data, np.random.default_rng(cfg.seed)
  shape = (cfg.step.accum_steps, data.batch_size // cfg.step.accum_steps, data.seq_len)
  half = rng.zipf(1.3, (*shape[:2], data.seq_len // 2 + 1)) % cfg.model.vocab_size
  text = np.concatenate([half, half], axis=-1)
  values = {
    "tokens": text[..., : data.seq_len],
    "targets": text[..., 1 : data.seq_len + 1],
    "segment_ids": np.ones(shape),
    "positions": np.broadcast_to(np.arange(data.seq_len), shape),
    "loss_mask": np.ones(shape),
  }
  return {name: values[name].astype(field.dtype) for name, field in FIELDS.items()}


def _logits(program: Program, model: Decoder, batch: dict[str, np.ndarray]) -> jax.Array:
  first = {name: value[0] for name, value in batch.items()}
  hidden, _ = model(
    first["tokens"],
    positions_BT=first["positions"],
    segment_ids_BT=first["segment_ids"],
    rules=program.rules(1),
  )
  return model.logits(hidden)


def _with_role(model: Decoder, other: Decoder, role: str) -> Decoder:
  """A model with the parameters of a role of another one."""
  is_it = lambda v: isinstance(v, Param) and role_name(v) == role
  pick = lambda ours, theirs: theirs if is_it(ours) else ours
  return jax.tree.map(pick, model, other, is_leaf=is_variable)
