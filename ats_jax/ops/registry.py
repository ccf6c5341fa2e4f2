"""Which implementation runs in which slot: decided once, in Python, with a reason that is logged.

Before anything is traced, `choose` fills the slots from the settings, the device and the table
`implementations.OPS`.
While an op is traced, `kernel` looks up the shape at hand in the device's tuning table, a file in
the repository, for tile parameters, or for a note that XLA is faster at this shape. Nothing is
measured in a run.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from absl import logging

from ats_jax.config.schema import Config
from ats_jax.ops.implementations import OPS, Kernel
from ats_jax.ops.requirements import Device

TUNING = Path(__file__).parent / "tuning"


@dataclasses.dataclass(frozen=True)
class Choice:
  """Which implementation of an op runs, and why. Logged at the start and kept in the workdir."""

  op: str
  implementation: str
  reason: str

  def __str__(self) -> str:
    return f"{self.op}: {self.implementation} ({self.reason})"


class FallbackError(ValueError):
  """`ops.strict` is set and the fast implementation cannot run."""


@dataclasses.dataclass(frozen=True)
class Kernels:
  """What runs where, for all ops; hashable, so that it can be a static argument.

  Attributes:
    names: ("op.slot", implementation) of every slot that does not run XLA's.
    tuned_for: the device kind whose tuning tables apply; "" = none do.
    asked: the "op.slot" that settings name: tables may give them tiles, but not replace them.
    tiles: ("name", value): tile parameters for every kernel, instead of a tuning table's.
  """

  names: tuple[tuple[str, str], ...] = ()
  tuned_for: str = ""
  asked: tuple[str, ...] = ()
  tiles: tuple[tuple[str, int], ...] = ()

  def of(self, op: str, slot: str) -> str:
    """The implementation in a slot."""
    return dict(self.names).get(f"{op}.{slot}", "xla")


XLA = Kernels()


def choose(cfg: Config, device: Device) -> tuple[Kernels, tuple[Choice, ...]]:
  """Fill the slots of all ops that this run uses.

  Args:
    cfg: the run, resolved.
    device: where it runs.

  Returns:
    What runs, and a choice for each op that has a kernel (one for each slot where they differ).

  Raises:
    ValueError: if an implementation that was asked for cannot run here, or does not exist.
    FallbackError: if `ops.strict` is set and the default of a GPU cannot run.
  """
  asked = asked_for(cfg)  # also for ops that this run does not use
  used = [op for op, entry in OPS.items() if entry.kernels and entry.is_used(cfg)]
  names, choices = _filled(cfg, device, used)
  return Kernels(names, tuned_for=device.kind, asked=tuple(asked)), choices


def choose_generation(cfg: Config, device: Device, kernels: Kernels) -> Kernels:
  """What runs in the inference engine, which reads one text a row; raises as `choose`."""
  cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, max_segments=1))
  used = [op for op, e in OPS.items() if e.generates or (e.kernels and e.is_used(cfg))]
  return dataclasses.replace(kernels, names=_filled(cfg, device, used)[0])


def _filled(cfg, device, ops) -> tuple[tuple[tuple[str, str], ...], tuple[Choice, ...]]:
  names, choices = [], []
  for op in ops:
    of_op = choose_op(cfg, device, op)
    names += [(f"{op}.{s}", c.implementation) for s, c in of_op.items()]
    choices += _merged(op, of_op)
  return tuple((slot, name) for slot, name in names if name != "xla"), tuple(choices)


def choose_op(cfg: Config, device: Device, op: str) -> dict[str, Choice]:
  """A choice for each slot of one op. Raises as `choose`."""
  asked = asked_for(cfg)
  return {slot: _choose_slot(cfg, device, op, slot, asked) for slot in OPS[op].slots}


def _choose_slot(cfg, device, op, slot, asked) -> Choice:
  setting, name = asked.get(f"{op}.{slot}", ("", ""))
  if name == "xla":
    return Choice(op, "xla", setting)
  if name:
    kernel = _kernel(op, name)
    if obstacle := kernel.obstacle(cfg, device):
      instead = setting.replace(f"={name}", "=xla").removeprefix("ops.kernels=")
      raise ValueError(f"{setting}: {obstacle}. Use {instead}, or leave it out.")
    return Choice(op, name, setting)
  chosen, missed, reasons = None, [], []
  for kernel in OPS[op].preferred(slot):
    if slot not in kernel.where or (device.platform == "gpu" and kernel.platform != "gpu"):
      continue  # a GPU misses nothing that is for others
    if device.platform != "gpu" and (obstacle := kernel.obstacle(cfg, device)):
      missed.append(obstacle)  # its speed on a GPU says nothing here
    elif slot not in kernel.default:
      reasons.append(f"{kernel.name} is no default: {kernel.why}")
    elif reserve := kernel.reserve(cfg, device):
      reasons.append(f"{kernel.name} is no default for this config: {reserve} ({kernel.why})")
    elif obstacle := kernel.obstacle(cfg, device):
      missed.append(obstacle)
    else:
      chosen = kernel
      break
  if device.platform != "gpu":
    missed, reasons = missed[:1], [] if missed else reasons  # the others are for GPUs too
  name = chosen.name if chosen else "xla"
  is_fallback = chosen is None or chosen.is_xla
  if missed and is_fallback and device.platform == "gpu" and cfg.ops.strict:
    raise FallbackError(
      f"ops.strict: {op} would fall back to {name} because {'; '.join(missed)}. "
      "Change that, or set ops.strict=false."
    )
  if chosen:
    return Choice(op, name, "; ".join([chosen.why, *missed]))
  reasons = missed + reasons
  return Choice(op, name, f"reference: {'; '.join(reasons) or 'this slot has no kernel'}")


def asked_for(cfg: Config) -> dict[str, tuple[str, str]]:
  """What the settings say: "op.slot" -> (the setting as text, the implementation).

  Raises:
    ValueError: for an op, slot or implementation in `ops.kernels` that does not exist.
  """
  asked = {}
  # Of whole ops first: what is said of a slot goes before it.
  for key, name in sorted(cfg.ops.kernels.items(), key=lambda item: "." in item[0]):
    op, _, slot = key.partition(".")
    _check_asked(op, slot, name, f"ops.kernels: {key}={name}")
    for each in [slot] if slot else OPS[op].slots:
      if name == "xla" or slot or each in _kernel(op, name).where:
        asked[f"{op}.{each}"] = (f"ops.kernels={key}={name}", name)
  return asked


def _check_asked(op: str, slot: str, name: str, where: str) -> None:
  """Refuse what does not exist; `slot` is "" for all of the op."""
  if op not in OPS:
    raise ValueError(f"{where}: no op {op!r}; there are {', '.join(OPS)}.")
  entry = OPS[op]
  if slot and slot not in entry.slots:
    raise ValueError(f"{where}: {op} has the slots {', '.join(entry.slots)}.")
  fitting = [k.name for k in entry.kernels if not slot or slot in k.where]
  if name not in ["xla", *fitting]:
    raise ValueError(f"{where}: {name!r} is not one of {', '.join(['xla', *fitting])}.")


def _merged(op: str, of_op: dict[str, Choice]) -> list[Choice]:
  if len(set(of_op.values())) == 1:
    return [next(iter(of_op.values()))]
  return [dataclasses.replace(c, op=f"{op}.{slot}") for slot, c in of_op.items()]


def kernel(op: str, slot: str, kernels: Kernels, **dims: int) -> functools.partial | None:
  """The kernel for a slot at one shape, its tile parameters filled in; None = XLA's version.

  Args:
    op: of `ops.implementations.OPS`.
    slot: of that op.
    kernels: the run's.
    dims: the sizes of one device's arrays by which tuning tables are kept. `rows` is rounded up
      to a power of two. None = the op has no such tables.
  """
  name = kernels.of(op, slot)
  if name == "xla":
    return None
  tiles = dict(kernels.tiles)
  if kernels.tuned_for and dims and not tiles:
    tuned = tuned_choice(kernels.tuned_for, op, slot, shape_class(**dims))
    if tuned is not None and (tuned[0] == name or f"{op}.{slot}" not in kernels.asked):
      name, tiles = tuned
    if name == "xla":
      return None
  chosen = _kernel(op, name)
  tiles = {tile: value for tile, value in tiles.items() if tile in chosen.tiles}
  return functools.partial(chosen.where[slot], **tiles)


def shape_class(*, rows: int, **widths: int) -> str:
  """The key of a tuning table: `rows` up to the next power of two, widths as they are."""
  rounded = 1 << max(0, rows - 1).bit_length()
  return ",".join([f"rows<={rounded}", *(f"{k}={v}" for k, v in sorted(widths.items()))])


@functools.cache
def tuned_choice(kind: str, op: str, slot: str, shape: str) -> tuple[str, Mapping[str, int]] | None:
  """What the tuning table of a device kind says of a shape; logged, once each."""
  entry = tuning_table(kind, op).get(slot, {}).get(shape)
  if entry is None:
    logging.info("%s.%s, %s: not tuned for %s, the kernel's own tiles", op, slot, shape, kind)
    return None
  logging.info("%s.%s, %s: %s %s, tuned", op, slot, shape, entry["implementation"], entry["tiles"])
  return entry["implementation"], entry["tiles"]


@functools.cache
def tuning_table(kind: str, op: str) -> dict[str, dict[str, dict]]:
  """Of each slot: shape class -> {implementation, tiles, ms, xla_ms}; {} if nothing was tuned."""
  path = tuning_file(kind, op)
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def tuning_file(kind: str, op: str) -> Path:
  """Where the table of an op on a device kind is kept."""
  return TUNING / re.sub(r"\W+", "_", kind.lower()) / f"{op}.json"


def _kernel(op: str, name: str) -> Kernel:
  found = {k.name: k for k in OPS[op].kernels}
  if name not in found:
    raise ValueError(f"{op}: no implementation {name!r}; there are {', '.join(['xla', *found])}.")
  return found[name]
