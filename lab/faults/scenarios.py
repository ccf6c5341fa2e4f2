"""What is done to a run: faults F1-F9 and F11, and N1, the negative controls: legitimate surprises.

A scenario changes the rows of a step, the gradient or the learning rate (traced, `inject`), or
the state before the step. When, how badly and where is drawn from the run's seed, alike for every
arm.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ats_jax.model.moe import MoE
from ats_jax.model.param import Role, merge, params_of, trainable
from ats_jax.step.optimizers.base import per_parameter
from ats_jax.step.state import TrainState

Rows = dict[str, np.ndarray]  # arrays [accum, batch, seq]
EARLIEST, LATEST = 0.3, 0.7  # of the run: where a fault may begin
CONTROLS = ("N1", "N2", "A1")


class Injection(NamedTuple):
  """What happens at one step.

  Attributes:
    rows: the batch that is trained on.
    gradient: multiplies the gradients; may be NaN.
    rate: multiplies the learning rate, behind the schedule's back.
    state: maps the state before the step to what is used, or None.
    schedule: multiplies the schedule's rate.
    minority: bool [batch], rows of another domain that the run is meant to learn; None = no row.
  """

  rows: Rows
  gradient: float = 1.0
  rate: float = 1.0
  state: Callable[[TrainState], TrainState] | None = None
  schedule: float = 1.0
  minority: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Draw:
  """What chance decided for one run.

  Attributes:
    name: of the scenario.
    seed: of the run.
    onset: first step (0-based) at which anything may happen.
    severity: one of the scenario's three.
    vocab_size: ids of noise are below it.
    other: batch of another domain, by name (domains.py), for a step.
  """

  name: str
  seed: int
  onset: int
  severity: float
  vocab_size: int
  other: Callable[[str, int], Rows]

  def rng(self, step: int = 0) -> np.random.Generator:
    """Chance at one step, the same whoever asks."""
    return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), step])

  def within(self, step: int, length: float) -> bool:
    """Whether `step` is one of the first `length` from the onset on."""
    return self.onset <= step < self.onset + length


Inject = Callable[[Draw, int, Rows], Injection]


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A kind of fault.

  Attributes:
    family: F1-F9, F11, or N1 for what is no fault; those of the audit are in audit.py.
    severities: mild, middling, bad; what the number means is said by `inject`.
    inject: what happens at a step.
    cause: what a supervisor should say: "learning rate", "data", "state", "router", "plateau"; ""
      if nothing.
    domain: what else is trained on, and scored by itself; "" = nothing else.
    begins: the onset, where it is not drawn.
  """

  family: str
  severities: tuple[float, float, float]
  inject: Inject
  cause: str = ""
  domain: str = ""
  begins: int | None = None

  @property
  def is_control(self) -> bool:
    """Whether nothing is wrong, so that nothing lasting may be done."""
    return self.family in CONTROLS

  def draw(
    self,
    name: str,
    seed: int,
    num_steps: int,
    vocab_size: int,
    other: Callable[[str, int], Rows],
  ) -> Draw:
    """Let chance decide for the run with this seed."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    onset = int(num_steps * rng.uniform(EARLIEST, LATEST))
    severity = self.severities[rng.integers(3)]
    onset = onset if self.begins is None else self.begins
    return Draw(name, seed, onset, severity, vocab_size, other)


# ---- F1: the learning rate


def rate_burst(draw: Draw, step: int, rows: Rows) -> Injection:
  """Multiplied with the severity for 30 steps."""
  return Injection(rows, rate=draw.severity if draw.within(step, 30) else 1.0)


def rate_forever(draw: Draw, step: int, rows: Rows) -> Injection:
  """Multiplied with the severity from the onset on."""
  return Injection(rows, rate=draw.severity if step >= draw.onset else 1.0)


# ---- F2, F3, F7: the data


def _stream(rows: Rows, ids: np.ndarray) -> Rows:
  """`rows` with the text `ids` [accum, batch, seq + 1]."""
  return rows | {"tokens": ids[..., :-1], "targets": ids[..., 1:]}


def _noise(draw: Draw, step: int, rows: Rows) -> Rows:
  *lead, seq = rows["tokens"].shape
  ids = draw.rng(step).integers(0, draw.vocab_size, (*lead, seq + 1), dtype=np.int32)
  return _stream(rows, ids)


def noise_burst(draw: Draw, step: int, rows: Rows) -> Injection:
  """As many batches as the severity says are uniform noise."""
  return Injection(_noise(draw, step, rows) if draw.within(step, draw.severity) else rows)


def noise_share(draw: Draw, step: int, rows: Rows) -> Injection:
  """A share of all batches from the onset on is uniform noise."""
  hit = step >= draw.onset and draw.rng(step).random() < draw.severity
  return Injection(_noise(draw, step, rows) if hit else rows)


def shuffled_targets(draw: Draw, step: int, rows: Rows) -> Injection:
  """Targets are permuted within as many batches as the severity says."""
  if draw.within(step, draw.severity):
    rows = rows | {"targets": draw.rng(step).permuted(rows["targets"].ravel()).reshape(
      rows["targets"].shape)}  # fmt: skip
  return Injection(rows)


def repeats(draw: Draw, step: int, rows: Rows) -> Injection:
  """One token over and over, in as many batches as the severity says."""
  if draw.within(step, draw.severity):
    *lead, seq = rows["tokens"].shape
    rows = _stream(rows, np.full((*lead, seq + 1), draw.rng().integers(256), np.int32))
  return Injection(rows)


def stretched(draw: Draw, step: int, rows: Rows) -> Injection:
  """Positions 64 times too far apart in as many batches as the severity says: bad packing."""
  if draw.within(step, draw.severity):
    rows = rows | {"positions": rows["positions"] * 64}
  return Injection(rows)


# ---- F4, F5: the gradient


def nan_gradient(draw: Draw, step: int, rows: Rows) -> Injection:
  """As many steps as the severity says have a gradient of NaN; they are 7 apart."""
  since = step - draw.onset
  hit = 0 <= since < 7 * draw.severity and since % 7 == 0
  return Injection(rows, gradient=np.nan if hit else 1.0)


def huge_gradient(draw: Draw, step: int, rows: Rows) -> Injection:
  """A fiftieth of the steps from the onset on has a gradient as many times too large."""
  hit = step >= draw.onset and draw.rng(step).random() < 0.02
  return Injection(rows, gradient=draw.severity if hit else 1.0)


# ---- F4, F6: the state


def _edit_matrix(state: TrainState, rng: np.random.Generator, edit: Callable) -> TrainState:
  """`state` with one matrix of the model, chosen by chance, replaced by `edit(matrix)`."""
  params: Any = trainable(state.model)
  leaves, structure = jax.tree.flatten(params)
  which = rng.choice([i for i, p in enumerate(params_of(params)) if len(p.axes) > 1])
  old = leaves[which]
  leaves[which] = jax.device_put(edit(np.array(old)), old.sharding)
  return dataclasses.replace(state, model=merge(structure.unflatten(leaves), state.model))


def _places(matrix: np.ndarray, rng: np.random.Generator, count: float) -> tuple:
  return np.unravel_index(rng.choice(matrix.size, int(count), replace=False), matrix.shape)


def nan_weight(draw: Draw, step: int, rows: Rows) -> Injection:
  """As many weights of a matrix as the severity says become NaN, once: no batch is to blame."""
  if step != draw.onset:
    return Injection(rows)
  rng = draw.rng(step)

  def edit(matrix: np.ndarray) -> np.ndarray:
    matrix[_places(matrix, rng, draw.severity)] = np.nan
    return matrix

  return Injection(rows, state=lambda state: _edit_matrix(state, rng, edit))


def scaled_matrix(draw: Draw, step: int, rows: Rows) -> Injection:
  """A matrix is multiplied with the severity, once: silent corruption."""
  if step != draw.onset:
    return Injection(rows)
  edit = lambda matrix: matrix * np.float32(draw.severity)
  return Injection(rows, state=lambda state: _edit_matrix(state, draw.rng(step), edit))


def flipped_bits(draw: Draw, step: int, rows: Rows) -> Injection:
  """The highest bit of the exponent flips in as many weights of a matrix as the severity says."""
  if step != draw.onset:
    return Injection(rows)
  rng = draw.rng(step)

  def edit(matrix: np.ndarray) -> np.ndarray:
    matrix.view(np.uint32)[_places(matrix, rng, draw.severity)] ^= np.uint32(1 << 30)
    return matrix

  return Injection(rows, state=lambda state: _edit_matrix(state, rng, edit))


# ---- F8, F9: the experts


def _moes(tree: Any) -> list[MoE]:
  """The stacked layers with experts of a model, or of moments."""
  layers = [layer for blocks in tree.segments for layer in blocks.layers]
  return [layer.mlp for layer in layers if isinstance(layer.mlp, MoE)]


def _chosen(draw: Draw, state: TrainState, count: float) -> np.ndarray:
  """As many experts in use as `count` says, by chance: the same in each layer."""
  router = _moes(state.model)[0].router
  in_use = np.flatnonzero(np.asarray(router.is_open())[0, : router.num_slots])
  return draw.rng().choice(in_use, int(count), replace=False)


def _write(variable: Any, experts: np.ndarray, edit: Callable) -> None:
  """Replace what arrays [layers, experts, ...] hold of some experts."""
  array = np.array(variable[...])
  array[:, experts] = edit(array[:, experts])
  variable[...] = jax.device_put(array, variable[...].sharding)


def _push_two(draw: Draw, step: int, rows: Rows, name: str) -> Injection:
  """Add to what a router's `name` holds of two experts."""
  if step != draw.onset:
    return Injection(rows)

  def edit(state: TrainState) -> TrainState:
    for moe in _moes(state.model):
      chosen = _chosen(draw, state, 2)
      _write(getattr(moe.router, name), chosen, lambda x: x + draw.severity)
    return state

  return Injection(rows, state=edit)


def collapsed_router(draw: Draw, step: int, rows: Rows) -> Injection:
  """As much as the severity says is added to the logits of two experts of each layer, once."""
  return _push_two(draw, step, rows, "offset")


def biased_router(draw: Draw, step: int, rows: Rows) -> Injection:
  """The same to the bias that chooses: neither probabilities nor any weight change."""
  return _push_two(draw, step, rows, "bias_E")


def dead_experts(draw: Draw, step: int, rows: Rows) -> Injection:
  """As many experts of each layer as the severity says are chosen no more; their moments are 0."""
  if step != draw.onset:
    return Injection(rows)

  def edit(state: TrainState) -> TrainState:
    dead = _chosen(draw, state, draw.severity)
    for moe in _moes(state.model):
      _write(moe.router.bias_E, dead, lambda x: x - 1e3)
    for moe in itertools.chain(*(_moes(tree) for _, tree in per_parameter(state.opt_state))):
      for moment in params_of(moe):
        if moment.role is Role.EXPERT:
          _write(moment, dead, np.zeros_like)
    return state

  return Injection(rows, state=edit)


# ---- F11: a learning rate that is too low


def low_rate(draw: Draw, step: int, rows: Rows) -> Injection:
  """Multiplied with the severity in the whole run."""
  return Injection(rows, rate=draw.severity)


# ---- N1: what may surprise, and is right


def clean(draw: Draw, step: int, rows: Rows) -> Injection:
  """Nothing happens."""
  del draw, step
  return Injection(rows)


def domain_switch(draw: Draw, step: int, rows: Rows) -> Injection:
  """From the onset on, a share of the rows is of another kind of text."""
  if step < draw.onset:
    return Injection(rows)
  taken = int(draw.severity * rows["tokens"].shape[1])
  foreign = draw.other("prose", step)
  join = lambda old, new: np.concatenate([new[:, :taken], old[:, taken:]], axis=1)
  return Injection({name: join(rows[name], foreign[name]) for name in rows})


def rate_jump(draw: Draw, step: int, rows: Rows) -> Injection:
  """Somebody raises the learning rate and tells nobody."""
  return rate_forever(draw, step, rows)


def small_batch(draw: Draw, step: int, rows: Rows) -> Injection:
  """From the onset on, as many rows of a batch as the severity says count."""
  if step < draw.onset:
    return Injection(rows)
  counts = np.arange(rows["tokens"].shape[1]) < draw.severity
  return Injection(rows | {"loss_mask": rows["loss_mask"] * counts[None, :, None]})


def length_jump(draw: Draw, step: int, rows: Rows) -> Injection:
  """Until the onset, rows are cut into documents as long as the severity says: a curriculum."""
  if step >= draw.onset:
    return Injection(rows)
  piece, place = np.divmod(np.arange(rows["tokens"].shape[2], dtype=np.int32), int(draw.severity))
  spread = lambda x: np.broadcast_to(x, rows["tokens"].shape)
  return Injection(rows | {"segment_ids": spread(piece + 1), "positions": spread(place)})


SCENARIOS = {
  "rate_burst": Scenario("F1", (10.0, 30.0, 100.0), rate_burst, "learning rate"),
  "rate_forever": Scenario("F1", (10.0, 30.0, 100.0), rate_forever, "learning rate"),
  "noise_burst": Scenario("F2", (10, 20, 40), noise_burst, "data"),
  "noise_share": Scenario("F2", (0.02, 0.05, 0.1), noise_share, "data"),
  "shuffled_targets": Scenario("F3", (30, 60, 90), shuffled_targets, "data"),
  "nan_gradient": Scenario("F4", (1, 3, 10), nan_gradient),
  "nan_weight": Scenario("F4", (1, 10, 100), nan_weight, "state"),
  "huge_gradient": Scenario("F5", (1e2, 1e3, 1e4), huge_gradient),
  "scaled_matrix": Scenario("F6", (10.0, 30.0, 100.0), scaled_matrix, "state"),
  "flipped_bits": Scenario("F6", (1, 4, 16), flipped_bits, "state"),
  "repeats": Scenario("F7", (10, 20, 40), repeats, "data"),
  "stretched": Scenario("F7", (20, 40, 80), stretched, "data"),
  "collapsed_router": Scenario("F8", (4.0, 6.0, 8.0), collapsed_router),
  "biased_router": Scenario("F8", (4.0, 6.0, 8.0), biased_router),
  "dead_experts": Scenario("F9", (1, 1, 2), dead_experts, "router"),
  "low_rate": Scenario("F11", (0.02, 0.05, 0.1), low_rate, "plateau"),
  "clean": Scenario("N1", (0, 0, 0), clean),
  "domain_switch": Scenario("N1", (0.25, 0.5, 1.0), domain_switch),
  "rate_jump": Scenario("N1", (1.5, 2.0, 3.0), rate_jump),
  "small_batch": Scenario("N1", (2, 2, 4), small_batch),
  "length_jump": Scenario("N1", (4, 8, 16), length_jump),
}
