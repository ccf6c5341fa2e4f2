"""The train steps of a run, compiled: found by all that makes one differ from another."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax

from ats_jax.checkpoint import abstract_like
from ats_jax.model.forward_pass import Pass
from ats_jax.sharding.mesh import on_mesh
from ats_jax.step.program import Program, predicted_bytes

THREAD = "compile"  # begins the name of the thread that compiles


class Key(NamedTuple):
  """What a train step is compiled for.

  Attributes:
    rules: the rules of the pass.
    seq_len: positions in the rows of its batch; it has the same tokens in each case.
  """

  rules: Pass
  seq_len: int


@dataclasses.dataclass(frozen=True)
class PendingStep:
  """A train step that a thread compiles.

  Attributes:
    key: key of the step; None = nothing was begun.
    step: the future of the compiled step.
  """

  key: Key | None = None
  step: Future[jax.stages.Compiled] = dataclasses.field(default_factory=Future)


class CompiledSteps:
  """One step for each length of rows, by the rules that hold.

  Attributes:
    pending: the step whose compilation began last.
  """

  def __init__(self, pending: PendingStep):
    self.pending = pending
    self._steps: dict[Key, jax.stages.Compiled] = {}
    self._flops: dict[int, Mapping[str, float]] = {}  # by length

  def __contains__(self, key: Key) -> bool:
    return key in self._steps

  @property
  def rules(self) -> Pass | None:
    """Those of its steps; None = it has none."""
    return next((key.rules for key in self._steps), None)

  def find(self, program: Program, key: Key) -> jax.stages.Compiled:
    """The step of a key; waits for the compiler if it is not there. Those of other rules go."""
    if key not in self._steps:
      if key != self.pending.key:
        self.pending = begin_compiling(program, key)
      step = self.pending.step.result()
      if self.rules != key.rules:  # as mod.capacity falls, once 8 bits are off
        self._steps.clear()
      self._steps[key] = step
      self._flops[key.seq_len] = program.flops_per_token(key.seq_len)
    return self._steps[key]

  def flops_per_token(self, key: Key) -> Mapping[str, float]:
    """FLOPs per token by name (`Program.flops_per_token`), of a step that `find` returned."""
    return self._flops[key.seq_len]

  def predicted_bytes(self) -> int | None:
    """Device memory that the largest of them needs; None = there is none, or nobody planned it."""
    planned = [step for step in self._steps.values() if isinstance(step, jax.stages.Compiled)]
    return max(map(predicted_bytes, planned), default=None)


def begin_compiling(program: Program, key: Key) -> PendingStep:
  """Start to compile the train step, while the state is made or read: its shapes are all it takes.

  The thread launches nothing on the devices, so processes of a job need not agree on its pace. What
  it raises, `result` raises. A second Ctrl-C ends the process whatever it does (`StopSignal`).
  """
  mesh = jax.sharding.get_mesh()

  def compile_step() -> jax.stages.Compiled:
    with on_mesh(program.cfg, mesh):  # a thread begins without one
      state = abstract_like(program.init(abstract=True), mesh)
      return program.compile_train_step(state, key.rules, key.seq_len)

  pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
  step = pool.submit(compile_step)
  pool.shutdown(wait=False)  # of the thread once it is done
  return PendingStep(key, step)
