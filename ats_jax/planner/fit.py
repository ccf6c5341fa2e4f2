"""Searches for the fastest mesh, remat and accumulation that fit the memory of the devices.

The search is best first. A candidate enters with a bound of its time, from the shapes of the model;
its time, which needs the bytes of its state, is asked for when no bound is lower, and its memory,
which needs a trace of the step, when no candidate that is left could be faster.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ats_jax.config.schema import Config
from ats_jax.config.validate import validate
from ats_jax.model.count import count
from ats_jax.model.layout import check_stages
from ats_jax.model.numerics import is_unrolled
from ats_jax.model.param import initial_sharding, weights_of
from ats_jax.planner.abstract import (
  abstract_mesh,
  abstract_state,
  device_bytes,
  resolve_without_data,
)
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.hardware import Hardware
from ats_jax.planner.memory import activations, peak, state_memory
from ats_jax.planner.seconds import step_seconds
from ats_jax.sharding.apply import num_shards
from ats_jax.sharding.mesh import ONE_HOST, on_mesh
from ats_jax.sharding.pipeline import num_stages
from ats_jax.sharding.rules import MESH_AXES, ZERO_AXES
from ats_jax.step.state import TrainState

SHOWN_SLOWER = 8  # how many slower meshes are listed
SCALING_SLACK = 1.02  # how far scaled activations may exceed traced ones


class Axis(NamedTuple):
  """A mesh axis whose size is searched; `data` takes the devices that are left.

  Attributes:
    name: the name of the setting in `mesh`.
    most: gives the largest size for a config.
  """

  name: str
  most: Callable[[Config], int]


# Between candidates that take equally long, less of a later row wins. An axis that talks in every
# layer should not leave a host.
AXES = (
  Axis("fsdp", lambda cfg: cfg.model.d_model),
  Axis("context", lambda cfg: min(ONE_HOST, cfg.model.num_heads)),
  Axis("expert", lambda cfg: max(1, cfg.moe.num_experts)),
  Axis("tensor", lambda cfg: min(ONE_HOST, cfg.model.num_kv_heads)),
  Axis("stage", lambda cfg: cfg.model.num_layers),
)
REMATS = ("none", "dots", "names", "qkv", "attention", "full")  # from what computes least twice
ROUNDS = (1, 2, 4)  # of `mesh.stage_rounds`; more are as many messages for less and less
STAGE_REMATS = ("dots", "names", "qkv", "attention")  # of `step.remat_stages`, which else is 'full'
ZERO_STAGES = (3, 2, 1)  # of `mesh.zero`, from what takes least memory


class Candidate(NamedTuple):
  """One way to run a config.

  Attributes:
    settings: the settings that the search decides, by dotted name.
    seconds: the seconds of a step (`likely` of `step_seconds`).
    bytes: the bytes that a device needs; None = not computed. If the state alone is too large, the
      bytes of the state.
    fits: whether the bytes are within the limit.
  """

  settings: dict[str, Any]
  seconds: float
  bytes: int | None = None
  fits: bool = False

  @property
  def mesh(self) -> str:
    """The mesh as text."""
    sizes = {name.removeprefix("mesh."): n for name, n in self.settings.items() if "mesh." in name}
    zero, keeps = sizes.pop("zero"), sizes.pop("keep_gathered")
    axes = [f"{axis}={n}" for axis, n in sizes.items() if n > 1] or ["data=1"]
    axes += [f"zero={zero}"] * (zero < 3) + ["keep_gathered"] * keeps
    return ", ".join(axes)


class FitResult(NamedTuple):
  """The result of the search.

  Attributes:
    pick: the fastest candidate that fits; None = none does.
    considered: candidates whose memory was computed, fastest first; a pick is the last.
    slower: the fastest meshes that are slower than the pick, whose memory was not computed; the
      fastest candidate of each.
    unseen: the number of further slower meshes.
    refused: the reason for each mesh that is not possible.
    plan: the plan (`describe`) of the pick, or of the candidate that needs least.
    cfg: the config of that plan.
    limit: the bytes that a device has.
  """

  pick: Candidate | None
  considered: list[Candidate]
  slower: list[Candidate]
  unseen: int
  refused: dict[str, str]
  plan: dict[str, Any]
  cfg: Config
  limit: int


def fit(cfg: Config, devices: int, limit: int, hardware: Hardware) -> FitResult:
  """Find the fastest plan of a config that fits.

  The rows of an update, their length and the model stay, so every candidate makes the same updates.

  Args:
    cfg: the config, resolved or not; its mesh is not read.
    devices: the number of devices.
    limit: the bytes that a device has.
    hardware: the rates of devices and links.

  Raises:
    ValueError: if no mesh of so many devices is possible.
  """
  cfg = resolve_without_data(cfg)
  search = _Search(cfg, devices, limit, hardware)
  refused = search.start()
  if not search.queue:
    reasons = "; ".join(sorted(set(refused.values())))
    raise ValueError(f"no mesh of {devices} devices is possible: {reasons}")
  considered: list[Candidate] = []
  while search.queue and not (considered and considered[-1].fits):
    considered += search.look_at_fastest()
  pick = considered[-1] if considered[-1].fits else None
  best = with_settings(cfg, (pick or search.smallest(considered)).settings)
  plan = describe(best, devices, hardware)
  slower, unseen = search.others({c.mesh for c in considered})
  return FitResult(pick, considered, slower, unseen, refused, plan, best, limit)


def with_settings(cfg: Config, settings: dict[str, Any]) -> Config:
  """Replace settings of a resolved config, by dotted name."""
  for name, value in settings.items():
    section, field = name.split(".")
    part = dataclasses.replace(getattr(cfg, section), **{field: value})
    cfg = dataclasses.replace(cfg, **{section: part})
  return cfg


def meshes(cfg: Config, devices: int) -> Iterator[dict[str, Any]]:
  """Yield every split of the devices over `data` and AXES, with what trades memory for messages."""
  divisors = lambda most: [n for n in range(1, min(devices, most) + 1) if devices % n == 0]
  for sizes in itertools.product(*(divisors(axis.most(cfg)) for axis in AXES)):
    if devices % math.prod(sizes):
      continue
    mesh: dict[str, Any] = {"mesh.data": devices // math.prod(sizes)}
    mesh |= {f"mesh.{axis.name}": n for axis, n in zip(AXES, sizes, strict=True)}
    # What is refused where it does nothing, and in a pipeline.
    if (asked := cfg.mesh.compress_gradients) != "none":
      sends = mesh["mesh.data"] > 1 and mesh["mesh.stage"] == 1
      mesh["mesh.compress_gradients"] = asked if sends else "none"
    shards = math.prod(mesh[f"mesh.{axis}"] for axis in ZERO_AXES)
    for zero in ZERO_STAGES if shards > 1 else ZERO_STAGES[:1]:
      gathers = shards > 1 and mesh["mesh.stage"] == 1 and zero == 3
      if cfg.mesh.copy_engines:  # likewise
        mesh["mesh.copy_engines"] = gathers
      stages, layers = mesh["mesh.stage"], cfg.model.num_layers
      rounds = [n for n in ROUNDS if n == 1 or (stages > 1 and layers % (stages * n) == 0)]
      for number, keep in itertools.product(rounds, (False, True) if gathers else (False,)):
        of_zero = {"mesh.zero": zero, "mesh.stage_rounds": number, "mesh.keep_gathered": keep}
        yield mesh | of_zero


def remats(mesh: dict[str, Any]) -> list[dict[str, Any]]:
  """List the remat settings to try; with a pipeline also those that recompute stages only."""
  choices = [{"step.remat": remat, "step.remat_stages": "full"} for remat in REMATS]
  if mesh["mesh.stage"] > 1:
    stages = [{"step.remat": "none", "step.remat_stages": policy} for policy in STAGE_REMATS]
    choices = stages + choices
  return choices


class _Entry(NamedTuple):
  """A candidate in the queue; the smallest comes first.

  Attributes:
    seconds: the seconds of a step, or a lower bound of them.
    ties: decides between equal seconds; unique to each entry.
    settings: as in `Candidate`.
    is_bound: whether `seconds` is a lower bound.
  """

  seconds: float
  ties: tuple[int, ...]
  settings: dict[str, Any]
  is_bound: bool


class _Search:
  """A queue of candidates, fastest first; of each mesh and remat the fastest accumulation left."""

  def __init__(self, cfg: Config, devices: int, limit: int, hardware: Hardware):
    self.cfg, self.devices, self.limit, self.hardware = cfg, devices, limit, hardware
    self.queue: list[_Entry] = []
    self.of_state: dict[tuple[str, bool], int] = {}  # bytes, by mesh and whether there are sums
    self.too_large: set[str] = set()  # meshes whose state is
    self.states: dict[str, TrainState] = {}
    self.kept: dict[Any, list[int]] = {}  # of one and two rows, by axes and remat
    alone = {f"mesh.{axis}": 1 for axis in (*MESH_AXES, "stage_rounds")}
    one = with_settings(cfg, alone | {"step.accum_steps": 1})
    with on_mesh(one, abstract_mesh(one)):
      state = abstract_state(one)
    self.model, self.bytes = state.model, device_bytes(state)
    self.counts = count(one, self.model, cfg.data.seq_len)

  def start(self) -> dict[str, str]:
    """Fill the queue; return meshes that are not possible, and why."""
    refused = {}
    for mesh in meshes(self.cfg, self.devices):
      first = mesh | remats(mesh)[0] | {"step.accum_steps": mesh["mesh.stage"]}
      try:
        self._check(validate(with_settings(self.cfg, first)))
      except ValueError as error:
        refused[Candidate(first, 0.0).mesh] = str(error).splitlines()[0]
        continue
      for remat in remats(mesh):
        self._push(first | remat)
    return refused

  def look_at_fastest(self) -> list[Candidate]:
    """The fastest that is left with its memory; if it does not fit, others of its mesh follow."""
    entry = self._fastest()
    candidate, cfg = (
      Candidate(entry.settings, entry.seconds),
      with_settings(self.cfg, entry.settings),
    )
    if candidate.mesh in self.too_large:
      return []
    state = self._state(cfg, candidate.mesh)
    key = candidate.mesh, cfg.step.accum_steps > 1
    if key not in self.of_state:
      with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
        self.of_state[key] = sum(state_memory(cfg, state).values())
    of_state = self.of_state[key]
    if of_state > self.limit:  # nor does it with more micro-batches
      self.too_large.add(candidate.mesh)
      return [candidate._replace(bytes=of_state)]
    with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
      of_step = peak(cfg, state, self._kept).parts
    used = of_state + sum(of_step.values())
    if used <= SCALING_SLACK * self.limit:  # what was scaled is traced
      used = planned_bytes(describe(cfg, self.devices))
    if used > self.limit:
      self._push(entry.settings, above=cfg.step.accum_steps)
    return [candidate._replace(bytes=used, fits=used <= self.limit)]

  def smallest(self, considered: list[Candidate]) -> Candidate:
    """The candidate that needs least memory: smallest state, full remat, one row at a time."""
    least = min(considered, key=lambda c: c.bytes or 0)
    mesh = {name: n for name, n in least.settings.items() if name.startswith("mesh.")}
    shards = mesh["mesh.data"] * mesh["mesh.fsdp"] * mesh["mesh.expert"]
    most = self.cfg.data.batch_size // shards
    settings = mesh | remats(mesh)[-1] | {"step.accum_steps": most, "mesh.keep_gathered": False}
    return Candidate(settings, self._seconds(settings))

  def others(self, looked_at: set[str]) -> tuple[list[Candidate], int]:
    """The fastest of some meshes that were not looked at, and how many more of these there are."""
    found: dict[str, Candidate] = {}
    name = lambda entry: Candidate(entry.settings, entry.seconds).mesh
    self.queue = [entry for entry in self.queue if name(entry) not in looked_at]
    left = {name(entry) for entry in self.queue}
    heapq.heapify(self.queue)
    while self.queue and len(found) < SHOWN_SLOWER:
      entry = self._fastest()
      found.setdefault(name(entry), Candidate(entry.settings, entry.seconds))
    return list(found.values()), len(left) - len(found)

  def _fastest(self) -> _Entry:
    """Take the fastest candidate from the queue."""
    while True:
      entry = heapq.heappop(self.queue)
      if not entry.is_bound:
        return entry
      seconds = self._seconds(entry.settings)
      heapq.heappush(self.queue, entry._replace(seconds=seconds, is_bound=False))

  def _push(self, settings: dict[str, Any], above: int = 0) -> None:
    """Add a candidate, with the fastest number of micro-batches `above` some."""
    rows, stages = _rows(with_settings(self.cfg, settings), self.devices), settings["mesh.stage"]
    numbers = [n for n in range(above + 1, rows + 1) if rows % n == 0 and n % stages == 0]
    if not numbers:
      return
    if stages == 1:  # more of them are slower
      numbers = numbers[:1]
    tries = [settings | {"step.accum_steps": n} for n in numbers]
    if settings["mesh.keep_gathered"]:  # which a loop over layers refuses
      tries = [s for s in tries if is_unrolled(with_settings(self.cfg, s), "gpu")]
    if not tries:
      return
    seconds, accum, settings = min((self._bound(s), s["step.accum_steps"], s) for s in tries)
    later = [settings[f"mesh.{axis.name}"] for axis in reversed(AXES)]
    of_stage = settings["step.remat_stages"]
    kept = STAGE_REMATS.index(of_stage) if of_stage in STAGE_REMATS else len(STAGE_REMATS)
    remat, zero = REMATS.index(settings["step.remat"]), ZERO_STAGES.index(settings["mesh.zero"])
    rounds, keeps = settings["mesh.stage_rounds"], settings["mesh.keep_gathered"]
    ties = (remat, *later, keeps, zero, rounds, kept)
    heapq.heappush(self.queue, _Entry(seconds, (accum, *ties), settings, is_bound=True))

  def _check(self, cfg: Config) -> None:
    """Check that a mesh is possible.

    Raises:
      ValueError: if it is not.
    """
    with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
      check_stages(cfg, num_stages())
      for param in weights_of(self.model):
        initial_sharding(param.shape[param.ndim - len(param.axes) :], param.axes, param.role)

  def _bound(self, settings: dict[str, Any]) -> float:
    """A lower bound of a candidate's seconds: as if its state were sharded over all devices."""
    return self._seconds(settings, self.bytes // self.devices)

  def _seconds(self, settings: dict[str, Any], state_bytes: int | None = None) -> float:
    cfg = with_settings(self.cfg, settings)
    with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
      if state_bytes is None:
        state_bytes = device_bytes(self._state(cfg, Candidate(settings, 0.0).mesh))
      return step_seconds(cfg, self.model, state_bytes, self.counts, self.hardware)["likely"]

  def _state(self, cfg: Config, mesh: str) -> TrainState:
    if mesh not in self.states:
      with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
        self.states[mesh] = abstract_state(cfg)
    return self.states[mesh]

  def _kept(self, cfg: Config, rows: int) -> int:
    """The bytes of `activations` for `rows` rows on a device, scaled from those of one and two."""
    # Copies change nothing on a device, and a part of a row is as so much less of a row. Gathered
    # experts are kept, however many ways they were cut.
    mesh = cfg.mesh
    are_cut = mesh.fsdp * mesh.context > 1 and mesh.zero == 3
    fsdp = 1 + (are_cut and cfg.moe.num_experts > 0)
    copies = self.devices // (fsdp * mesh.expert * mesh.tensor)
    alike = {"mesh.data": copies, "mesh.fsdp": fsdp, "mesh.zero": 3, "step.accum_steps": 1}
    alike |= {"mesh.context": 1, "mesh.stage": 1, "mesh.stage_rounds": 1}
    alike |= {"step.remat_stages": "full", "data.batch_size": self.devices}
    cfg, key = with_settings(cfg, alike), (fsdp, mesh.expert, mesh.tensor, cfg.step.remat)
    if key not in self.kept:
      with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
        state = abstract_state(cfg)
        self.kept[key] = [activations(cfg, state, number) for number in (1, 2)]
    one, two = self.kept[key]
    return round(one + (two - one) * (rows / mesh.context - 1))


def _rows(cfg: Config, devices: int = 0) -> int:
  """The rows of an update on one device."""
  with on_mesh(cfg, abstract_mesh(cfg, devices)):
    return cfg.data.batch_size // num_shards("batch")
