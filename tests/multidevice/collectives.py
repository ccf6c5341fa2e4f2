"""Collectives of a compiled program, read from its HLO text."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from helpers import micro_batches, random_rows

from ats_jax.config import Config
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*?)\)")


class Array(NamedTuple):
  """A result of a collective, on one device."""

  dtype: str  # as HLO names it
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    """How many elements it has."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """How much memory it takes."""
    return self.size * (_BYTES.get(self.dtype) or (1 if "8" in self.dtype else 4))


class Collective(NamedTuple):
  """One collective of a program; XLA may have combined several into it."""

  kind: str  # of KINDS
  arrays: tuple[Array, ...]  # its results
  in_loop: int  # how many loops are around it
  op: str  # where it comes from, by `op_name` of its metadata
  groups: str  # the devices that take part, as HLO writes them

  @property
  def bytes(self) -> int:
    """Of its results."""
    return sum(array.bytes for array in self.arrays)


def collectives(text: str) -> list[Collective]:
  """All collectives of a compiled program, by `jax.stages.Compiled.as_text`."""
  lines: dict[str, list[str]] = {}
  current = ""
  for line in text.splitlines():
    if found := _COMPUTATION.match(line):
      current = found[1]
      lines[current] = []
    elif current:
      lines[current].append(line)
  depth = _loops_around(lines)
  found = []
  for name, body in lines.items():
    for line in body:
      if match := _COLLECTIVE.search(line):
        arrays = tuple(
          Array(dtype, tuple(map(int, filter(None, shape.split(",")))))
          for dtype, shape in _ARRAY.findall(match[1])
        )
        op = re.search(r'op_name="([^"]*)"', line)
        groups = re.search(r"replica_groups=(\S+)", line)
        of_line = op[1] if op else "", groups[1].rstrip(",") if groups else ""
        found.append(Collective(match[2], arrays, depth.get(name, 0), *of_line))
  return found


def _loops_around(lines: dict[str, list[str]]) -> dict[str, int]:
  """How many `while` loops are around each computation."""
  callers: dict[str, list[tuple[str, int]]] = {}
  for name, body in lines.items():
    for line in body:
      for how, names in _CALLED.findall(line):
        for called in re.findall(r"[\w.-]+", names):
          callers.setdefault(called, []).append((name, int(how == "body")))

  def depth(name: str) -> int:
    return max((depth(caller) + one for caller, one in callers.get(name, ())), default=0)

  return {name: depth(name) for name in lines}


def compiled_step(cfg: Config, mesh: jax.sharding.Mesh) -> Any:
  """The train step of a config on a mesh, compiled; call under the mesh."""
  return traced_step(cfg, mesh).lower().compile()


def traced_step(cfg: Config, mesh: jax.sharding.Mesh) -> Any:
  """Likewise, traced."""
  program = make_program(cfg)
  rows = random_rows(cfg, cfg.data.batch_size)
  batch = to_global(micro_batches(rows, cfg.step.accum_steps), mesh)
  return program.train_step.trace(program.init(abstract=True), batch, program.training_rules(1))


def every_equation(jaxpr: Any) -> Iterator[Any]:
  """Of a jaxpr and of those inside its equations."""
  is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
  for eqn in jaxpr.eqns:
    yield eqn
    for param in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=is_jaxpr):
      if is_jaxpr(param):
        yield from every_equation(getattr(param, "jaxpr", param))
