"""What is done to a run: faults that real runs have, and healthy changes that may surprise.

Each comes through a door that production has: the rows of a step, the state between two steps, the
computation of a step, the schedule, the settings. When and where is drawn from the run's seed,
alike for every arm.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema.mixture import Phase
from ats_jax.model.param import Role, merge, params_of, trainable
from ats_jax.step.optimizers.base import per_parameter
from ats_jax.step.state import TrainState
from lab.faults.inject import PLACES, WAYS, Miscomputed

Rows = dict[str, np.ndarray]  # arrays [accum, batch, seq]
CLASSES = ("state", "computation", "data", "rate", "healthy")
EARLIEST, LATEST = 0.3, 0.7  # of the run: where a fault may begin


class Injection(NamedTuple):
  """What happens at one step."""

  rows: Rows  # that are trained on
  schedule: float = 1.0  # multiplies the schedule's rate
  state: Callable[[TrainState], TrainState] | None = None  # what becomes of the state before it


class Draw(NamedTuple):
  """What chance decided for one run."""

  name: str  # of the scenario
  seed: int
  onset: int  # first step (0-based) at which anything may happen
  num_steps: int
  vocab_size: int
  rows: Callable[[str, int], Rows]  # of a domain, or others of the same ("main"), for a step

  def rng(self, step: int = 0) -> np.random.Generator:
    """Chance at one step, the same whoever asks."""
    return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), step])

  def within(self, step: int, length: float) -> bool:
    """Whether `step` is one of the first `length` from the onset on."""
    return self.onset <= step < self.onset + length


Inject = Callable[[Draw, int, Rows], Injection]
# What is computed wrongly at a time of the run, of a model with such parameters. By time: a step
# that is made again later is made by a machine that may be well by then.
Computes = Callable[[Draw, int, list[Any]], Miscomputed | None]


clean: Inject = lambda draw, step, rows: Injection(rows)  # nothing happens


class Scenario(NamedTuple):
  """A kind of fault, or of healthy change."""

  kind: str  # of `CLASSES`
  inject: Inject = clean
  computes: Computes | None = None
  domain: str = ""  # what else is trained on, and scored by itself
  begins: int | None = None  # the onset, where it is not drawn
  # What the user set: fields of `optimizer`, and the `phases` of `data`.
  settings: tuple[tuple[str, Any], ...] = ()

  def draw(self, name: str, seed: int, num_steps: int, vocab_size: int, rows: Callable) -> Draw:
    """Let chance decide for the run with this seed."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    onset = int(num_steps * rng.uniform(EARLIEST, LATEST))
    onset = onset if self.begins is None else self.begins
    return Draw(name, seed, onset, num_steps, vocab_size, rows)


# ---- data, some rows of which are changed

Change = Callable[[Draw, int, Rows], Rows]


def garbage(draw: Draw, step: int, rows: Rows) -> Rows:
  """Bytes without meaning."""
  *lead, seq = rows["tokens"].shape
  ids = draw.rng(step).integers(0, min(256, draw.vocab_size), (*lead, seq + 1), dtype=np.int32)
  return rows | {"tokens": ids[..., :-1], "targets": ids[..., 1:]}


def repeated_text(draw: Draw, step: int, rows: Rows) -> Rows:
  """The same row over and over, in all batches: text that was not deduplicated."""
  first = draw.rows("main", 0)
  return {name: np.broadcast_to(first[name][:, :1], x.shape).copy() for name, x in rows.items()}


def same_rows(draw: Draw, step: int, rows: Rows) -> Rows:
  """Each row four times in its batch: workers that draw from one seed."""
  first = np.arange(rows["tokens"].shape[1]) // 4 * 4
  return {name: x[:, first] for name, x in rows.items()}


def token_offset(draw: Draw, step: int, rows: Rows) -> Rows:
  """Ids of a tokenizer with another number of special tokens."""
  shifted = lambda x: np.where(x < 256, (x + 3) % 256, x).astype(x.dtype)
  return rows | {name: shifted(rows[name]) for name in ("tokens", "targets")}


def wrong_targets(draw: Draw, step: int, rows: Rows) -> Rows:
  """Targets in another order within each row."""
  return rows | {"targets": draw.rng(step).permuted(rows["targets"], axis=-1)}


def _bad_rows(change: Change, length: float = math.inf, share: float = 1.0) -> Scenario:
  def inject(draw: Draw, step: int, rows: Rows) -> Injection:
    if not draw.within(step, length):
      return Injection(rows)
    taken = draw.rng(step + draw.num_steps).random(rows["tokens"].shape[1]) < share
    return Injection(_picked(taken, rows, change(draw, step, rows)))

  return Scenario("data", inject)


def _picked(taken: np.ndarray, rows: Rows, other: Rows) -> Rows:
  return {name: np.where(taken[None, :, None], other[name], x) for name, x in rows.items()}


# ---- state: it is changed once, so that no batch and no step is to blame

Edit = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _once(edit: Callable[[TrainState, np.random.Generator], TrainState]) -> Scenario:
  def inject(draw: Draw, step: int, rows: Rows) -> Injection:
    is_now, edited = step == draw.onset, lambda state: edit(state, draw.rng(step))
    return Injection(rows, state=edited if is_now else None)

  return Scenario("state", inject)


def matrices(params: list[Any]) -> list[int]:
  """Which of the parameters of a model are matrices."""
  return [i for i, param in enumerate(params) if len(param.axes) > 1]


def _edited(x: jax.Array, rng: np.random.Generator, edit: Edit) -> jax.Array:
  return jax.device_put(edit(np.array(x), rng), x.sharding)


def _edit_one(tree: Any, rng: np.random.Generator, edit: Edit) -> Any:
  """`tree` with one of its matrices, chosen by chance, edited."""
  leaves, structure = jax.tree.flatten(tree)
  which = rng.choice(matrices(params_of(tree)))
  leaves[which] = _edited(leaves[which], rng, edit)
  return structure.unflatten(leaves)


def _weights(edit: Edit) -> Scenario:
  def whole(state: TrainState, rng: np.random.Generator) -> TrainState:
    params = _edit_one(trainable(state.model), rng, edit)
    return dataclasses.replace(state, model=merge(params, state.model))

  return _once(whole)


def _moments(name: str, edit: Callable[[Any, np.random.Generator], Any]) -> Scenario:
  def whole(state: TrainState, rng: np.random.Generator) -> TrainState:
    (old,) = [tree for found, tree in per_parameter(state.opt_state) if found == name]
    swap = lambda tree: edit(tree, rng) if tree is old else tree
    opt_state = jax.tree.map(swap, state.opt_state, is_leaf=lambda tree: tree is old)
    return dataclasses.replace(state, opt_state=opt_state)

  return _once(whole)


def _some_nan(matrix: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  matrix.reshape(-1)[rng.choice(matrix.size, 10, replace=False)] = np.nan
  return matrix


def _flip(bit: int) -> Edit:
  def edit(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    array.reshape(-1).view(np.uint32)[rng.integers(array.size)] ^= np.uint32(1 << bit)
    return array

  return edit


def _flip_moment(name: str, bit: int) -> Scenario:
  return _moments(name, lambda tree, rng: _edit_one(tree, rng, _flip(bit)))


def _flip_step(state: TrainState, rng: np.random.Generator) -> TrainState:
  return dataclasses.replace(state, step=_edited(state.step, rng, _flip(6)))


# ---- the computation of a step


def _miscomputed(
  place: str,
  way: str,
  amount: float = 1.0,
  length: float = 60,
  part: float = 1.0,
  every: int = 1,
  of: Role | str | None = None,
) -> Scenario:
  """A part of one tensor is computed wrongly, in one of `every` steps; which part is drawn.

  `of` is the tensor's role, or "all" for all as one, as in a bucket that is sent; None = a matrix.
  """

  def computes(draw: Draw, now: int, params: list[Any]) -> Miscomputed | None:
    if not draw.within(now, length) or (now - draw.onset) % every:
      return None
    rng = draw.rng()
    begin, size, row = 0.0, 1.0, 1
    if place != "activations" and of != "all":
      which = int(rng.choice([i for i in matrices(params) if of in (None, params[i].role)]))
      sizes = [param.size for param in params]
      begin, size = sum(sizes[:which]) / sum(sizes), sizes[which] / sum(sizes)
      row = params[which].shape[-1]
    first = begin + size * rng.uniform(0.0, 1.0 - part)
    by = amount * row if way == "shift" else amount
    return Miscomputed(PLACES.index(place), WAYS.index(way), first, first + size * part, by)

  return Scenario("computation", computes=computes)


# ---- the learning rate


def _schedule(factor: float, length: float = math.inf, begins: int | None = None) -> Scenario:
  """The schedule is computed wrongly for as many steps."""
  rate = lambda draw, step: factor if draw.within(step, length) else 1.0
  inject = lambda draw, step, rows: Injection(rows, schedule=rate(draw, step))
  return Scenario("rate", inject, begins=begins)


def _set(kind: str, *phases: tuple[float, int], **settings: Any) -> Scenario:
  """What the user set; phases are schedules that follow each other: (peak of the rate, steps)."""
  parts = tuple(Phase(steps=n, learning_rate=rate, warmup_steps=20) for rate, n in phases)
  settings |= {"phases": parts} if parts else {}
  return Scenario(kind, begins=0, settings=tuple(settings.items()))


# ---- healthy


def _with(domain: str, taken: Callable[[Draw, int, int], np.ndarray], **more: Any) -> Scenario:
  """Some rows are of another domain: of a run, a step and the number of rows, which."""

  def inject(draw: Draw, step: int, rows: Rows) -> Injection:
    chosen = taken(draw, step, rows["tokens"].shape[1])
    return Injection(_picked(chosen, rows, draw.rows(domain, step)))

  return Scenario("healthy", inject, domain=domain, **more)


def _files(draw: Draw, step: int, size: int) -> np.ndarray:
  """Of each 60 batches 15 in a row, as the files of a domain come."""
  return np.full(size, 0 <= step % 60 - draw.rng().integers(46) < 15)


def _changed(change: Change, begins: int | None = None) -> Scenario:
  """Batches are others from the onset on."""
  changed = lambda d, i, rows: change(d, i, rows) if i >= d.onset else rows
  inject = lambda draw, step, rows: Injection(changed(draw, step, rows))
  return Scenario("healthy", inject, begins=begins)


def _twice(draw: Draw, step: int, rows: Rows) -> Rows:
  more = draw.rows("main", step)
  return {k: np.concatenate([v, more[k]], axis=1) for k, v in rows.items()}


def _in_two(draw: Draw, step: int, rows: Rows) -> Rows:
  return {k: v.reshape(2, -1, v.shape[-1]) for k, v in rows.items()}


def _short(draw: Draw, step: int, rows: Rows) -> Rows:
  """In the first half of a run, documents have 8 tokens: a curriculum of lengths."""
  if step >= draw.num_steps // 2:
    return rows
  piece, place = np.divmod(np.arange(rows["tokens"].shape[2], dtype=np.int32), 8)
  spread = lambda x: np.broadcast_to(x, rows["tokens"].shape)
  return rows | {"segment_ids": spread(piece + 1), "positions": spread(place)}


RATE = 4e-3  # the good learning rate of the suite's model
SCENARIOS: dict[str, Scenario] = {
  "nan_weight": _weights(_some_nan),
  "scaled_matrix": _weights(lambda matrix, rng: matrix * np.float32(30.0)),
  "wrong_order": _weights(lambda x, rng: np.roll(x, x.shape[-1] // 2, axis=-1)),
  "lost_moments": _moments("nu", lambda tree, rng: jax.tree.map(jnp.zeros_like, tree)),
  "flip_weight_30": _weights(_flip(30)),
  "flip_weight_25": _weights(_flip(25)),
  "flip_mu_30": _flip_moment("mu", 30),
  "flip_nu_30": _flip_moment("nu", 30),
  "flip_nu_31": _flip_moment("nu", 31),
  "flip_step_6": _once(_flip_step),
  "nan_gradient": _miscomputed("gradients", "scale", math.nan, 21, every=7),
  "nan_gradient_long": _miscomputed("gradients", "scale", math.nan),
  "huge_gradient": _miscomputed("gradients", "scale", 1e4, 100, every=10),
  "gradient_sign": _miscomputed("gradients", "scale", -1.0, 100),
  "gradient_shift": _miscomputed("gradients", "shift", 1, of="all"),
  "gradient_flip": _miscomputed("gradients", "flip", 30, part=0.0),
  "update_scale": _miscomputed("updates", "scale", 100.0, 20),
  "update_shift": _miscomputed("updates", "shift", 1, part=0.5),
  "matmul_scale": _miscomputed("weights", "scale", 16.0, part=0.5),
  "matmul_shift": _miscomputed("weights", "shift", 1, part=0.25),
  "stale_weights": _miscomputed("weights", "old", length=100, part=0.5, of="all"),
  "matmul_flip": _miscomputed("weights", "flip", 30, every=10, part=0.0),
  "activation_flip": _miscomputed("activations", "flip", 30, every=10, part=0.0),
  "activation_shift": _miscomputed("activations", "shift", 1, part=0.25),
  "head_diverges": _miscomputed("updates", "scale", 100.0, math.inf, of=Role.HEAD),
  "lost_gather": _miscomputed("weights", "scale", 0.0, math.inf, every=7),
  "lost_gradient": _miscomputed("gradients", "scale", 0.0, math.inf, every=7),
  "lost_updates": _miscomputed("updates", "scale", 0.0, math.inf, of="all"),
  "lost_updates_one": _miscomputed("updates", "scale", 0.0, math.inf),
  "garbage_burst": _bad_rows(garbage, 20),
  "garbage_rows": _bad_rows(garbage, share=0.1),
  "wrong_targets": _bad_rows(wrong_targets, 60),
  "wrong_targets_rows": _bad_rows(wrong_targets, share=0.25),
  "repeated_text": _bad_rows(repeated_text, 40),
  "same_rows": _bad_rows(same_rows),
  "token_offset": _bad_rows(token_offset, share=0.25),
  "computed_x10_forever": _schedule(10.0),
  "computed_x30_forever": _schedule(30.0),
  "computed_x30_burst": _schedule(30.0, 30),
  "computed_x30_from_0": _schedule(30.0, begins=0),
  "set_x30": _set("rate", learning_rate=30 * RATE),
  "set_phase_x30": _set("rate", (RATE, 200), (30 * RATE, 0)),
  "clean": Scenario("healthy"),
  "script_batch_10": _with("script", lambda d, i, n: np.full(n, d.rng(i).random() < 0.1), begins=0),
  "script_row_10": _with("script", lambda d, i, n: d.rng(i).random(n) < 0.1, begins=0),
  "script_shard_25": _with("script", _files, begins=0),
  "table_shard_25": _with("table", _files, begins=0),
  "code_to_prose": _with("prose", lambda d, i, n: d.rng(i).random(n) < i / d.num_steps, begins=0),
  "domain_switch": _with("prose", lambda d, i, n: (np.arange(n) < n // 2) & (i >= d.onset)),
  "phase_x10": _set("healthy", (RATE / 10, 150), (RATE, 0)),
  "warm_restart": _set("healthy", (RATE, 200), (RATE, 0)),
  "rows_doubled": _changed(_twice),
  "accumulation": _changed(_in_two),
  "length_jump": _changed(_short, begins=0),
}
# Bits of what a step computes with, at times (arXiv:2604.00726).
FLIPS = ("gradient_flip", "matmul_flip", "activation_flip")
# Errors that go on until somebody sees them, by the causes of TrainCheck's (arXiv:2506.14813).
SILENT = ("lost_gather", "lost_gradient", "lost_updates", "lost_updates_one", "same_rows")
