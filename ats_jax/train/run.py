"""An open run: what the loop does with it, and what it consists of."""

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from absl import logging

from ats_jax.checkpoint import CheckpointManager, StopSignal, workdir
from ats_jax.cluster import runtime
from ats_jax.config import Config
from ats_jax.data.batch import POSITION, Batch
from ats_jax.data.rows.contract import Rows, TrainRows
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.sources import HELD_OUT, EvalSet
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.rows import read_jsonl
from ats_jax.metrics.throughput import Throughput
from ats_jax.metrics.watcher import Watcher
from ats_jax.metrics.writer import MetricWriter
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.step.program import Program
from ats_jax.step.state import StepMetrics, TrainState
from ats_jax.store.paths import Path
from ats_jax.train import report
from ats_jax.train.compiled import CompiledSteps, Key
from ats_jax.train.evaluate import check_fp8, score_all
from ats_jax.train.resize import DEVICES

if TYPE_CHECKING:  # imported by the runs that have one
  from ats_jax.orchestrator.supervisor import Supervisor


class FolderWatch(Watcher):
  """Ends a run whose folder was moved, before anything is written by its old name."""

  def __init__(self, checkpoints: CheckpointManager, every_steps: int):
    """Watch the folder of `checkpoints`: at each row of metrics, evaluation and checkpoint."""
    self._check, self._every_steps = checkpoints.check_folder, every_steps

  def after(self, step: int, state: Any, metrics: Any) -> Any:
    """Look at the folder; see `Watcher`."""
    del metrics
    if step % self._every_steps == 0:
      self._check()
    return state

  def pause(self, step: int, name: str) -> contextlib.AbstractContextManager[None]:
    """Look at the folder; see `Watcher`."""
    del step, name
    self._check()
    return contextlib.nullcontext()


@dataclasses.dataclass(kw_only=True)
class Run:
  """An open run. The loop reads and writes `state`; the rest goes through the methods.

  Attributes:
    program: the functions of its config. It is replaced when 8 bits are switched off.
    folder: the workdir.
    state: the state after `step` updates.
    step: number of updates done.
    steps: the train steps that are compiled.
    train_set: the rows of the training split.
    valid_set: the rows of the validation split; may have none.
    eval_sets: the validation split, if it has rows, and the named validation sets.
    batches: batches of the training split, from the run's position on.
    devices: how the batch is divided among devices, for a resume on another number of them.
    checkpoints: saves and restores the state.
    stop: knows whether a signal asked the run to end.
    writer: writes metrics.
    goodput: adds up where the wall time goes.
    meter: measures tokens and steps a second.
    watchers: are called before and after each update, in this order; the supervisor is the last.
    supervisor: decides on actions, such as a rollback or another learning rate.
    scores: metrics of the last evaluation, if it was of `state`; else None.
  """

  program: Program
  folder: Path
  state: TrainState
  step: int
  steps: CompiledSteps
  train_set: TrainRows
  valid_set: Rows
  eval_sets: tuple[EvalSet, ...]
  batches: TrainBatches
  devices: Mapping[str, int]
  checkpoints: CheckpointManager
  stop: StopSignal
  writer: MetricWriter
  goodput: Goodput
  meter: Throughput
  watchers: tuple[Watcher, ...]
  supervisor: "Supervisor | NoSupervisor" = dataclasses.field(default_factory=NoSupervisor)
  scores: dict[str, float] | None = None
  _key: Key | None = None  # of the newest step

  @property
  def cfg(self) -> Config:
    """The resolved config, with the settings that the orchestrator has changed."""
    return self.program.cfg

  def compiled_step(self, step: int) -> Callable:
    """Return the train step for update `step` of the next batch, which is compiled if need be."""
    self._key = key = Key(self.program.training_rules(step), self.batches.row_length)
    if key not in self.steps:
      with self.aside("compile"):
        rules_are_new = key.rules != self.steps.rules
        self.steps.find(self.program, key)
        if rules_are_new:
          self.supervisor.follow(self.program, step, self.state)
    for watcher in self.watchers:
      watcher.before(step, self.state)
    return self.steps.find(self.program, key)

  def next_batch(self) -> Batch:
    """Return the next training batch, on the mesh. The wait for it is counted."""
    with self.timed("data_wait"):
      return next(self.batches)

  def finish_update(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """Take over the state after update `step`, or the one that a watcher puts in its place."""
    assert self._key is not None, "its step was compiled"
    self.step, self.state, self.scores = step, state, None
    self.meter.took(step, self.steps.flops_per_token(self._key))
    for watcher in self.watchers:
      self.state = watcher.after(step, self.state, metrics)

  def last_step(self, *, fp8: bool = True) -> Callable:
    """Return a train step by the last update's rules, for rows of any length.

    Args:
      fp8: whether layers in 8 bits stay so.
    """
    assert self._key is not None, "an update was made"
    rules = self._key.rules
    last = self._key._replace(rules=dataclasses.replace(rules, fp8=rules.fp8 and fp8))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
      key = last._replace(seq_len=batch["tokens"].shape[-1])
      return self.steps.find(self.program, key)(state, batch)

    return train_step

  def evaluate(self) -> None:
    """Score the weights on every evaluation set, if there is one."""
    if not self.eval_sets:
      return
    with self.aside("eval"):
      self.scores = score_all(self.program, self.state.weights, self.eval_sets, self.step)
      self.writer.write_scalars(self.step, self.scores)
      self.program = check_fp8(self.program, self.scores)
      self.supervisor.write_scalars(self.step, self.scores)

  def settle(self, metrics: StepMetrics) -> None:
    """Have the supervisor check the state before it is saved, or replace it."""
    with self.aside("checkpoint"):
      self.state = self.supervisor.settle(self.step, self.state, metrics)

  def save(self, *, locally: bool = False) -> None:
    """Save a checkpoint, or a snapshot in `local_dir`; it is written in the background."""
    with self.aside("checkpoint"):
      loss = (self.scores or {}).get("eval/loss")
      extra = self.position() | self.supervisor.saved() | {DEVICES: self.devices}
      extra[HELD_OUT] = {each.name: each.dataset.info.fingerprint for each in self.eval_sets}
      if locally:
        self.checkpoints.save_locally(self.step, self.state, extra)
      else:
        self.checkpoints.save(self.step, self.state, extra, metric=loss)
      stall = {"checkpoint/stall_secs": self.checkpoints.last_save_stall_secs}
      self.writer.write_scalars(self.step, stall)

  def position(self) -> dict[str, Any]:
    """Return the loop's part of a checkpoint's `extra`; the supervisor adds its own."""
    of_program = self.program.saved() | self.checkpoints.rest.saved()
    return {POSITION: self.batches.position(), **of_program}

  def finish(self, *, complete: bool) -> None:
    """Wait for the last checkpoint and report what was reached; with a sample if `complete`."""
    if complete:
      with self.timed("sample"):
        was_complete = self.scores is None  # before this start: its metrics have all of it
        if self.scores is None:
          self.scores = score_all(self.program, self.state.weights, self.eval_sets, self.step)
        if self.scores:
          found = report.scores(self.cfg, self.train_set, self.valid_set, self.scores)
          if found and not was_complete:
            self.writer.write_scalars(self.step, found)
        text = report.log_sample(self.program, self.folder, self.state, self.train_set)
        if text and not self._has_sample():
          self.writer.write_texts(self.step, {"sample": text})
    with self.timed("checkpoint"):
      self.checkpoints.finish()
    self.writer.write_scalars(self.step, self.goodput.summary())
    stats = self._performance()
    logging.info("%s\n%s", report.performance(stats), self.goodput.line())
    if jax.process_index() == 0:
      workdir.write_json(self.folder / workdir.PERFORMANCE, stats)
    logging.info("what happened, as a page: ats-jax report %s", shlex.quote(str(self.folder)))

  def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
    """Count the time of a block as part `name` of the loop."""
    return self.goodput.timed(name)

  @contextlib.contextmanager
  def aside(self, name: str) -> Iterator[None]:
    """Run a block that is not training: its time is counted as `name`, not as that of steps."""
    with contextlib.ExitStack() as stack:
      for watcher in self.watchers:
        stack.enter_context(watcher.pause(self.step, name))
      yield

  def _has_sample(self) -> bool:
    """Whether the log has the sample, as that of a run which was complete before may have."""
    path = self.folder / "metrics.jsonl"
    rows = read_jsonl(path) if self._key is None and path.exists() else []
    return any("sample" in row and row["step"] == self.step for row in rows)

  def _performance(self) -> dict[str, Any]:
    program = {
      "kernels": {choice.op: choice.implementation for choice in self.program.choices},
      "compiler_options": self.program.options,
      "compilation_cache": runtime.cache_use(self.cfg),
    }
    summaries = [watcher.summary() for watcher in self.watchers]
    return report.performance_stats(summaries, self.steps.predicted_bytes(), program)
