"""A run of a small model under a supervisor, with the batches that it was fed and a hand in it."""

import contextlib
import dataclasses

import canonical
import jax
import jax.numpy as jnp
import numpy as np
from helpers import counting_rows, micro_batches

from ats_jax.data.batch import POSITION
from ats_jax.data.rows.origin import Origin
from ats_jax.model.param import trainable
from ats_jax.orchestrator.ports import NextUpdates
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.interval import probe_loss
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.step import tensors

PROBE = counting_rows(10**6)
BATCH = 8


class FedLoop:
  """The training loop as its supervisor sees it: it says which row comes next.

  Attributes:
    train_step: (state, batch) -> (state, metrics), of steps that are made again too.
    fed: the batches so far.
    row: training rows that were read.
  """

  def __init__(self, train_step):
    self.train_step, self.fed, self.row = train_step, [], 0

  def position(self):
    return {POSITION: {"row": self.row}}

  def origin(self, row):
    """The second half of each batch is of another source."""
    source = ("web", "code")[row % BATCH * 2 // BATCH]
    return Origin((source,), row, (f"{source}.txt:{row}",))

  def ahead(self, saved=None):
    begin = (saved or self.position())[POSITION]["row"] // BATCH
    return NextUpdates(self.train_step, lambda: contextlib.nullcontext(iter(self.fed[begin:])))


class Run:
  """Calling it makes some steps.

  Attributes:
    state: after `step` updates.
    metrics: of the last step.
  """

  def __init__(self, program, path=None, *, cfg=None, probe=PROBE, **kwargs):
    self.program, self.path, self.step = program, path, 0
    self.state = canonical.state(cfg or program.cfg)
    self.loop = FedLoop(lambda *given: program.train_step(*given, program.training_rules(1)))
    self.supervisor = Supervisor(program, probe, path, **{"loop": self.loop, **kwargs})
    self.supervisor.start(0, self.state)

  def __call__(self, steps, rows=counting_rows, happen=None):
    """Make steps on `rows`; `happen(state)` is what a machine does to the results of each."""
    for _ in range(steps):
      self.step, self.loop.row = self.step + 1, self.loop.row + BATCH
      self.loop.fed.append(micro_batches(rows(self.step), 1))
      self.state, self.metrics = self.loop.train_step(self.state, self.loop.fed[-1])
      self.state = self.state if happen is None else happen(self.state)
      self.state = self.supervisor.after(self.step, self.state, self.metrics)
    return self

  def settle(self):
    self.state = self.supervisor.settle(self.step, self.state, self.metrics)

  def end(self):
    """The decisions, with their steps."""
    self.settle()
    self.supervisor.close()
    return self.supervisor.decisions

  def lines(self, kind):
    return [row for row in ledger.read_lines(self.path) if row["kind"] == kind]

  def probe_loss(self):
    sums = self.program.eval_step(self.state.model, PROBE, self.program.rules(1))
    return probe_loss(np.asarray(sums))


def scaled(state, name, factor):
  """`state` with the matrices of some name multiplied, as other code would: checksums show it."""
  one = lambda path, x: x * factor if name in jax.tree_util.keystr(path) else x
  return dataclasses.replace(state, model=jax.tree_util.tree_map_with_path(one, state.model))


def computed_wrongly(state, name, factor):
  """The same as if the step had computed it so: no checksum differs."""
  state = scaled(state, name, factor)
  written = tensors.checksums(trainable(state.model))
  return dataclasses.replace(state, reflex=state.reflex._replace(written=written))


def with_rate(state, factor):
  """`state` with all learning rates times a factor from now on."""
  scale = jnp.full_like(state.control.lr_scale, factor)
  return dataclasses.replace(state, control=state.control._replace(lr_scale=scale))
