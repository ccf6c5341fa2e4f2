"""Which mesh, remat and accumulation fit the memory of the devices, and are fastest among these.

The search is best first: a candidate's time needs shapes alone, and its memory, which needs a
trace, is asked for only when no candidate that is left could be faster.
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
from ats_jax.planner.abstract import abstract_mesh, abstract_state, resolve_without_data
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.hardware import Hardware
from ats_jax.planner.memory import activations, state_memory, step_memory
from ats_jax.planner.seconds import step_seconds
from ats_jax.sharding.apply import num_shards
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.rules import MESH_AXES
from ats_jax.step.state import TrainState

SLACK = 1.02  # how far what is scaled may be above what is traced
ONE_HOST = 8  # devices that `tensor` should not leave, as it talks in every layer


class Axis(NamedTuple):
  """A mesh axis whose size is searched; others stay as the config says.

  Attributes:
    name: of the setting in `mesh`.
    most: its largest size for a config.
  """

  name: str
  most: Callable[[Config], int]


# Between candidates that take equally long, less of a later row wins.
AXES = (
  Axis("fsdp", lambda cfg: cfg.model.d_model),
  Axis("expert", lambda cfg: max(1, cfg.moe.num_experts)),
  Axis("tensor", lambda cfg: min(ONE_HOST, cfg.model.num_kv_heads)),
)
REMATS = ("none", "dots", "names", "full")  # from what computes least twice
STAGES = (3, 2, 1)  # of `mesh.zero`, from what takes least memory


class Candidate(NamedTuple):
  """One way to run a config.

  Attributes:
    settings: what the search decides, by dotted name.
    seconds: of a step, `likely` of `step_seconds`.
    bytes: that a device needs; None = not looked at. Of a state that is too large by itself, that
      of the state.
    fits: whether it needs no more than there is.
  """

  settings: dict[str, Any]
  seconds: float
  bytes: int | None = None
  fits: bool = False

  @property
  def mesh(self) -> str:
    """Its mesh in words."""
    sizes = {name.removeprefix("mesh."): n for name, n in self.settings.items() if "mesh." in name}
    zero = sizes.pop("zero")
    axes = [f"{axis}={n}" for axis, n in sizes.items() if n > 1] or ["data=1"]
    return ", ".join(axes) + (f", zero={zero}" if zero < 3 else "")


class Fitted(NamedTuple):
  """What the search found.

  Attributes:
    pick: the fastest that fits; None = nothing does.
    considered: those whose memory was looked at, fastest first; a pick is the last.
    slower: the fastest of each mesh that was not looked at, as it is slower than the pick.
    refused: meshes that are not possible, and why.
    plan: of the pick, or else of what needs least, as `describe` gives it.
    cfg: its config.
    limit: bytes that a device has.
  """

  pick: Candidate | None
  considered: list[Candidate]
  slower: list[Candidate]
  refused: dict[str, str]
  plan: dict[str, Any]
  cfg: Config
  limit: int


def fit(cfg: Config, devices: int, limit: int, hardware: Hardware) -> Fitted:
  """Find the fastest plan of a config that fits.

  The rows of an update, their length and the model stay, so every candidate makes the same updates.

  Args:
    cfg: the run, resolved or not. Mesh axes that are not in AXES stay as they are.
    devices: how many share it.
    limit: bytes that a device has.
    hardware: rates.

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
  best = changed(cfg, (pick or search.smallest(considered)).settings)
  plan = describe(best, devices, hardware)
  slower = search.others({c.mesh for c in considered})
  return Fitted(pick, considered, slower, refused, plan, best, limit)


def changed(cfg: Config, settings: dict[str, Any]) -> Config:
  """A resolved `cfg` with settings of `mesh` and `step`, by dotted name."""
  for name, value in settings.items():
    section, field = name.split(".")
    part = dataclasses.replace(getattr(cfg, section), **{field: value})
    cfg = dataclasses.replace(cfg, **{section: part})
  return cfg


def meshes(cfg: Config, devices: int) -> Iterator[dict[str, int]]:
  """Every split of the devices over `data` and AXES, with the stages of ZeRO that differ."""
  searched = {"data", *(axis.name for axis in AXES)}
  fixed = math.prod(getattr(cfg.mesh, axis) for axis in MESH_AXES if axis not in searched)
  divisors = lambda most: [n for n in range(1, min(devices, most) + 1) if devices % n == 0]
  for sizes in itertools.product(*(divisors(axis.most(cfg)) for axis in AXES)):
    taken = fixed * math.prod(sizes)
    if devices % taken:
      continue
    mesh = {"mesh.data": devices // taken}
    mesh |= {f"mesh.{axis.name}": n for axis, n in zip(AXES, sizes, strict=True)}
    if cfg.mesh.shard_residuals:  # which is refused where it does nothing
      mesh["mesh.shard_residuals"] = mesh["mesh.tensor"] > 1
    for zero in STAGES if mesh["mesh.fsdp"] > 1 else STAGES[:1]:
      yield mesh | {"mesh.zero": zero}


class _Search:
  """A queue of candidates, fastest first; of each mesh and remat the least accumulation left."""

  def __init__(self, cfg: Config, devices: int, limit: int, hardware: Hardware):
    self.cfg, self.devices, self.limit, self.hardware = cfg, devices, limit, hardware
    self.queue: list[tuple[float, tuple[int, ...], dict[str, Any]]] = []
    self.of_state: dict[tuple[str, bool], int] = {}  # bytes, by mesh and whether there are sums
    self.too_large: set[str] = set()  # meshes whose state is
    self.counts: Any = None
    self.states: dict[str, TrainState] = {}
    self.kept: dict[Any, list[int]] = {}  # of one and two rows, by mesh and remat

  def start(self) -> dict[str, str]:
    """Fill the queue; return meshes that are not possible, and why."""
    refused = {}
    for mesh in meshes(self.cfg, self.devices):
      first = mesh | {"step.remat": REMATS[0], "step.accum_steps": 1}
      name = Candidate(first, 0.0).mesh
      try:
        cfg = validate(changed(self.cfg, first))
        with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
          self.states[name] = abstract_state(cfg)
      except ValueError as error:
        refused[name] = str(error).splitlines()[0]
        continue
      if self.counts is None:
        self.counts = count(cfg, self.states[name].model, cfg.data.seq_len)
      for remat in REMATS:
        self._push(first | {"step.remat": remat})
    return refused

  def look_at_fastest(self) -> list[Candidate]:
    """The fastest that is left with its memory; if it does not fit, others of its mesh follow."""
    seconds, _, settings = heapq.heappop(self.queue)
    candidate, cfg = Candidate(settings, seconds), changed(self.cfg, settings)
    if candidate.mesh in self.too_large:
      return []
    state = self.states[candidate.mesh]
    key = candidate.mesh, cfg.step.accum_steps > 1
    if key not in self.of_state:
      with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
        self.of_state[key] = sum(state_memory(cfg, state).values())
    of_state = self.of_state[key]
    if of_state > self.limit:  # nor does it with more micro-batches
      self.too_large.add(candidate.mesh)
      return [candidate._replace(bytes=of_state)]
    kept = {remat: self._kept(cfg, remat) for remat in {REMATS[0], cfg.step.remat}}
    with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
      of_step = step_memory(cfg, state, lambda cfg: kept[cfg.step.remat])
    used = of_state + sum(of_step.values())
    if used <= SLACK * self.limit:  # what was scaled is traced
      used = planned_bytes(describe(cfg, self.devices))
    if used > self.limit:
      self._push_more_micro_batches(settings)
    return [candidate._replace(bytes=used, fits=used <= self.limit)]

  def smallest(self, considered: list[Candidate]) -> Candidate:
    """What needs least where nothing fits: the smallest state, most recomputed, one row a time."""
    least = min(considered, key=lambda c: c.bytes or 0)
    mesh = {name: n for name, n in least.settings.items() if name.startswith("mesh.")}
    shards = mesh["mesh.data"] * mesh["mesh.fsdp"] * mesh["mesh.expert"]
    most = self.cfg.data.batch_size // shards
    settings = mesh | {"step.remat": REMATS[-1], "step.accum_steps": most}
    return Candidate(settings, self._seconds(settings))

  def others(self, looked_at: set[str]) -> list[Candidate]:
    """The fastest of each mesh that was not looked at."""
    found: dict[str, Candidate] = {}
    for seconds, _, settings in sorted(self.queue, key=lambda entry: entry[:2]):
      candidate = Candidate(settings, seconds)
      if candidate.mesh not in looked_at:
        found.setdefault(candidate.mesh, candidate)
    return list(found.values())

  def _push(self, settings: dict[str, Any]) -> None:
    later = [settings[f"mesh.{axis.name}"] for axis in reversed(AXES)]
    ties = (REMATS.index(settings["step.remat"]), *later, STAGES.index(settings["mesh.zero"]))
    entry = (self._seconds(settings), (settings["step.accum_steps"], *ties), settings)
    heapq.heappush(self.queue, entry)  # no two have the same ties

  def _push_more_micro_batches(self, settings: dict[str, Any]) -> None:
    cfg, accum = self.cfg, settings["step.accum_steps"]
    rows = _rows(changed(cfg, settings), self.devices)
    more = [n for n in range(accum + 1, rows + 1) if rows % n == 0]
    if more:
      self._push(settings | {"step.accum_steps": more[0]})

  def _seconds(self, settings: dict[str, Any]) -> float:
    cfg = changed(self.cfg, settings)
    with on_mesh(cfg, abstract_mesh(cfg, self.devices)):
      state = self.states[Candidate(settings, 0.0).mesh]
      return step_seconds(cfg, state, self.counts, self.hardware)["likely"]

  def _kept(self, cfg: Config, remat: str) -> int:
    """`activations` under a policy, scaled from those of one and two rows a device."""
    rows = _rows(cfg, self.devices) // cfg.step.accum_steps
    # Copies change nothing on a device. Gathered experts are kept, however many ways they were cut.
    gathers = cfg.mesh.fsdp > 1 and cfg.mesh.zero == 3 and cfg.moe.num_experts > 0
    small = dataclasses.replace(cfg.mesh, data=1, fsdp=1 + gathers, zero=3)
    step = dataclasses.replace(cfg.step, remat=remat, accum_steps=1)
    cfg = dataclasses.replace(cfg, mesh=small, step=step)
    key = small, remat
    if key not in self.kept:
      self.kept[key] = [_traced(cfg, number) for number in (1, 2)]
    one, two = self.kept[key]
    return one + (two - one) * (rows - 1)


def _rows(cfg: Config, devices: int = 0) -> int:
  """Rows of an update on a device."""
  with on_mesh(cfg, abstract_mesh(cfg, devices)):
    return cfg.data.batch_size // num_shards("batch")


def _traced(cfg: Config, rows: int) -> int:
  """`activations` of a config without accumulation, with so many rows on a device."""
  # The batch divides over all of the mesh, so it does over this part of it.
  data = dataclasses.replace(cfg.data, batch_size=rows * cfg.data.batch_size // _rows(cfg))
  cfg = dataclasses.replace(cfg, data=data)
  with on_mesh(cfg, abstract_mesh(cfg)):
    return activations(cfg, abstract_state(cfg))
