"""A run: its parts, opened in the order in which each needs those before it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from ats_jax.bridge.convert import check_tokenizer, load_model
from ats_jax.bridge.folder import is_source, open_source
from ats_jax.checkpoint import CheckpointManager, StopSignal, abstract_like, restore_tree, workdir
from ats_jax.cluster import runtime
from ats_jax.cluster.liveness.watchdog import READING, Watchdog, open_watchdog
from ats_jax.config import Config
from ats_jax.config.build import CHANGES, flatten, resolve, with_changes
from ats_jax.config.extend import load_extensions
from ats_jax.config.identity import RunIdentity
from ats_jax.data.batch import POSITION, Batch
from ats_jax.data.rows.loader import TrainBatches
from ats_jax.data.rows.rows import Rows, TrainRows
from ats_jax.data.sources import EvalSet, open_data, open_eval_sets
from ats_jax.data.tokens.file import extends, load_tokenizer, save_tokenizer
from ats_jax.metrics import logfile
from ats_jax.metrics.create import create_writer
from ats_jax.metrics.files import LayerLog
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.peaks import peak_flops
from ats_jax.metrics.profiler import ProfileWindow
from ats_jax.metrics.progress import Progress
from ats_jax.metrics.rows import read_jsonl
from ats_jax.metrics.steplog import StepLog
from ats_jax.metrics.throughput import Throughput
from ats_jax.metrics.writer import MetricWriter
from ats_jax.model.layout import stacks
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.paired import Ahead, Update
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.by_source import objective_of, of_sources
from ats_jax.step.program import Program, make_program
from ats_jax.step.sparse_value import worth
from ats_jax.step.state import StepMetrics, TrainState
from ats_jax.store.paths import Path
from ats_jax.train import report
from ats_jax.train.compiled import Begun, CompiledSteps, Key, begin_compiling
from ats_jax.train.evaluate import check_fp8, score_all
from ats_jax.train.feed import probe_feed, train_feed, upcoming
from ats_jax.train.length import with_length
from ats_jax.train.resize import DEVICES, fitted, relieved

PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class InitFrom:
  """Weights that a new run begins with.

  Attributes:
    folder: workdir of a run of this program, or a folder of Hugging Face's.
    step: checkpoint of the run: a step, "latest" or "best".
  """

  folder: Path
  step: str = "latest"


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where a run goes on, or begins.

  Attributes:
    step: updates done.
    extra: what was saved beside the state; {} at the beginning.
    restore: gives the state, from shapes, dtypes and shardings; None = there is none yet.
  """

  step: int = 0
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  restore: Callable[[TrainState], TrainState] | None = None


@dataclasses.dataclass
class Run:
  """An open run. The loop reads and writes `state`; the rest goes through the methods.

  Attributes:
    cfg: resolved, with what an orchestrator has changed.
    folder: the workdir.
    program: how it computes; another one once 8 bits are switched off.
    steps: the train steps that are compiled.
    state: as the last update left it.
    step: updates done.
    train_set: the training split.
    valid_set: the validation split; may be empty.
    eval_sets: what is evaluated on: the validation split, if it has rows, and named sets.
    batches: of the training split, from the run's position on.
    checkpoints: saves and restores.
    stop: whether a signal asks to end.
    writer: takes metrics.
    log: takes those of steps.
    profile: traces some steps.
    meter: of speed.
    goodput: of where the time goes.
    devices: what they share of the batch, for the next start.
    dog: sees that it gets on.
    watch: the supervisor.
    scores: of the last evaluation, if it was of this state.
  """

  cfg: Config
  folder: Path
  program: Program
  steps: CompiledSteps
  state: TrainState
  step: int
  train_set: TrainRows
  valid_set: Rows
  eval_sets: tuple[EvalSet, ...]
  batches: TrainBatches
  checkpoints: CheckpointManager
  stop: StopSignal
  writer: MetricWriter
  log: StepLog
  profile: ProfileWindow
  meter: Throughput
  goodput: Goodput
  devices: Mapping[str, int]
  dog: Watchdog
  watch: Supervisor | NoSupervisor = dataclasses.field(default_factory=NoSupervisor)
  scores: dict[str, float] | None = None
  _key: Key | None = None  # of the newest step
  _batch: Batch | None = None

  def compiled_step(self, step: int) -> Callable:
    """The function that makes update `step` of the next batch; compiled if there is none yet."""
    self.dog.step = step
    self._key = key = Key(self.program.training_rules(step), self.batches.row_length)
    if key not in self.steps:
      with self.aside("compile"):
        rules_are_new = key.rules != self.steps.rules
        self.steps.find(self.program, key)
        if rules_are_new:
          self.watch.follow(self.program, step, self.state)
    self.profile.before(step, self.state)
    return self.steps.find(self.program, key)

  def next_batch(self) -> Batch:
    """The next training batch, on the mesh."""
    with self.timed("data_wait"):
      self._batch = next(self.batches)
    return self._batch

  def took(self, step: int, metrics: StepMetrics) -> None:
    """Note that update `step` has set the state, and log its metrics."""
    assert self._key is not None, "its step was compiled"
    self.step, self.scores = step, None
    self.meter.took(step, self.steps.flops_per_token(self._key))
    self.log.push(step, metrics.names, metrics.values, metrics.layers)

  def evaluate(self) -> None:
    """Score the weights on every evaluation set, if there is one."""
    if not self.eval_sets:
      return
    with self.aside("eval"):
      self.scores = score_all(self.program, self.state.weights, self.eval_sets, self.step)
      self.writer.write_scalars(self.step, self.scores)
      self.program = check_fp8(self.program, self.scores)

  def save(self, *, locally: bool = False) -> None:
    """Save a checkpoint, or a snapshot in `local_dir`; it is written in the background."""
    with self.aside("checkpoint"):
      loss = (self.scores or {}).get("eval/loss")
      extra = self.position() | self.watch.saved() | {DEVICES: self.devices}
      if locally:
        self.checkpoints.save_locally(self.step, self.state, extra)
      else:
        self.checkpoints.save(self.step, self.state, extra, metric=loss)
      stall = {"checkpoint/stall_secs": self.checkpoints.last_save_stall_secs}
      self.writer.write_scalars(self.step, stall)

  def finish(self, *, whole: bool) -> None:
    """Wait for the last checkpoint and say what was reached; a sample too if the run is `whole`."""
    if whole:
      with self.timed("sample"):
        if self.scores is None:  # the run was complete before it began
          self.scores = score_all(self.program, self.state.weights, self.eval_sets, self.step)
        if self.scores:
          report.scores(self.cfg, self.train_set, self.valid_set, self.scores)
        text = report.sample(self.program, self.folder, self.state, self.train_set)
        if text and not self._has_sample():
          self.writer.write_texts(self.step, {"sample": text})
    with self.timed("checkpoint"):
      self.checkpoints.finish()
    self.writer.write_scalars(self.step, self.goodput.summary())
    stats = self._performance()
    logging.info("%s\n%s", report.performance(stats), self.goodput.line())
    if jax.process_index() == 0:
      workdir.write_json(self.folder / workdir.PERFORMANCE, stats)

  def _has_sample(self) -> bool:
    """Whether the log has the sample, as that of a run which was complete before may have."""
    path = self.folder / "metrics.jsonl"
    rows = read_jsonl(path) if self._key is None and path.exists() else []
    return any("sample" in row and row["step"] == self.step for row in rows)

  def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
    """Around a part of the loop: its time is counted under that name."""
    return self.goodput.timed(name)

  @contextlib.contextmanager
  def aside(self, name: str) -> Iterator[None]:
    """As `timed`, for work other than training: it does not count as slow steps."""
    with self.log.pause(self.step), self.timed(name):
      yield

  # What the supervisor asks for (`orchestrator.lent.Loop`).

  def position(self) -> dict[str, Any]:
    """The loop's part of a checkpoint's `extra`; the rest is what the supervisor has `saved`."""
    return {POSITION: self.batches.position(), **self.program.saved()}

  def again(self) -> Update:
    """A function that makes the last update again, from another state."""
    assert self._batch is not None, "an update was made"
    train_step, batch = self.goodput.marking(self._step_of), self._batch
    return lambda state: train_step(state, batch)

  def ahead(self, saved: Mapping[str, Any] | None = None) -> Ahead:
    """Functions that make the updates after `saved`, or the next ones, on their batches."""
    position = (saved or self.position())[POSITION]
    train_step = self.goodput.marking(self._step_of)
    return Ahead(train_step, lambda: upcoming(self.cfg, self.train_set, position))

  def _step_of(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """An update by the rules of the last one, of a batch of any of the run's shapes."""
    assert self._key is not None, "an update was made"
    key = self._key._replace(seq_len=batch["tokens"].shape[-1])
    return self.steps.find(self.program, key)(state, batch)

  def _performance(self) -> dict[str, Any]:
    program = {
      "kernels": {choice.op: choice.implementation for choice in self.program.choices},
      "compiler_options": self.program.options,
      "compilation_cache": runtime.cache_use(self.cfg),
    }
    predicted = self.steps.predicted_bytes()
    return report.performance_stats(self.goodput, self.meter, predicted, program)


@contextlib.contextmanager
def open_run(
  cfg: Config, folder: Path, snapshots: Snapshots, init: InitFrom | None = None
) -> Iterator[Run]:
  """Open a run where it goes on: from its newest good state, or else from the beginning.

  The order is that of need. Claim the workdir. Find the newest state, which may have been made with
  other settings. Open the data, which tells the vocabulary. Make the mesh and the program. Read on
  from the state's position, which tells the shape of the next batch. Begin to compile, and
  meanwhile restore the state, cut the logs to its step, and set the supervisor to watch.

  Args:
    cfg: the run, as its user wrote it.
    folder: its workdir.
    snapshots: states in host memory, empty at first; they outlive a run that is opened again.
    init: weights to begin with; a run that goes on has its own.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
  """
  goodput, folder = Goodput(), Path(folder)
  cfg = load_extensions(cfg)
  with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    enter(logfile.verbosity(cfg.log))
    identity = enter(workdir.claim(folder, cfg))
    enter(logfile.kept(folder, jax.process_index()))
    cfg = relieved(cfg, folder)
    dog = enter(open_watchdog(cfg, goodput, folder))
    directory = folder / workdir.CHECKPOINTS
    checkpoints = enter(
      CheckpointManager(directory, cfg.checkpoint, identity, stacks(cfg), str(cfg.mesh))
    )
    origin = find_origin(checkpoints, snapshots)
    with dog.during(READING):
      train_set, valid_set = open_data(cfg.data, cfg.seed)
      eval_sets = open_eval_sets(cfg.data, valid_set)
    cfg, length = with_length(cfg, train_set)
    workdir.write_config(folder, cfg)
    cfg = with_changes(cfg, origin.extra.get(CHANGES, {}))
    cfg = resolve(cfg, train_set.tokenizer.vocab_size)
    cfg, devices = fitted(cfg, origin.extra.get(DEVICES))
    mesh = make_mesh(cfg)
    enter(on_mesh(cfg, mesh))
    stop = enter(StopSignal())
    program = make_program(cfg, objective_of(cfg)).continued(origin.extra)
    batches = enter(
      train_feed(cfg, train_set, origin.extra.get(POSITION), tells=True, on_mesh=True)
    )
    first = Key(program.training_rules(origin.step + 1), batches.row_length)
    ended = origin.step >= cfg.num_steps
    steps = CompiledSteps(Begun() if ended else begin_compiling(program, first))
    state = restored_or_new(program, origin, init, train_set)
    if jax.process_index() == 0:
      save_tokenizer(train_set.tokenizer, folder / workdir.TOKENIZER)
    report.opening(program, folder, state, train_set, origin.step, length)
    meter = speed(program)
    writer, log = open_log(stack, program, folder, origin, meter, identity, train_set, dog)
    profile = enter(ProfileWindow(cfg.log.profile_step, PROFILED_STEPS, folder / "profile"))
    run = Run(
      cfg, folder, program, steps, state, origin.step, train_set, valid_set, eval_sets, batches,
      checkpoints, stop, writer, log, profile, meter, goodput, devices, dog,
    )  # fmt: skip
    run.watch = enter(open_watch(run, snapshots))
    run.watch.start(origin.step, state, origin.extra)
    stack.push(dog.take_error)  # the others hear of it before anything here waits for them
    try:
      yield run
    finally:
      # The supervisor holds the run: that cycle would keep the state on the devices.
      run.watch = NoSupervisor()


def find_origin(checkpoints: CheckpointManager, snapshots: Snapshots) -> Origin:
  """The newest state there is: a snapshot in host memory, or else an intact checkpoint."""
  kept = snapshots.newest(checkpoints.steps())
  if kept is not None:
    step, state, extra = kept
    # A program with smaller micro-batches (`relieved`) has the same arrays, in another structure.
    as_now = lambda abstract: jax.tree.unflatten(
      jax.tree.structure(abstract), jax.tree.leaves(state)
    )
    return Origin(step, extra, as_now)
  newest = checkpoints.newest()
  if newest is None:
    return Origin()
  step, extra = newest
  return Origin(step, extra, lambda abstract: checkpoints.read(step, abstract))


def restored_or_new(
  program: Program, origin: Origin, init: InitFrom | None, train_set: TrainRows
) -> TrainState:
  """The state of `origin`; at the beginning a new one, with the weights of `init` if there are."""
  if origin.restore is not None:
    abstract = abstract_like(program.init(abstract=True), jax.sharding.get_mesh())
    return origin.restore(abstract)
  state = program.init()
  return state if init is None else _with_weights(program, state, init, train_set)


def _with_weights(
  program: Program, state: TrainState, init: InitFrom, train_set: TrainRows
) -> TrainState:
  """A new state with the weights of another run, or of Hugging Face, in this run's dtypes."""
  if is_source(init.folder):
    check_tokenizer(init.folder, program.cfg, train_set.tokenizer)
    source, mesh = open_source(init.folder), jax.sharding.get_mesh()
    model = load_model(source, program.cfg, abstract_like(state.model, mesh))
    logging.info("the weights are those of %s in %s", source.family.name, init.folder)
    return _beginning_with(state, model)
  source = workdir.load_config(init.folder)
  tokenizer = init.folder / workdir.TOKENIZER
  if not extends(train_set.tokenizer, load_tokenizer(tokenizer)):
    raise ValueError(
      f"--init_from={init.folder}: its tokenizer is not the one of this run, so its weights would "
      f"read other tokens. Use its own, --config.data.tokenizer={tokenizer}."
    )
  part = "ema" if source.optimizer.ema_decay else "model"
  stored = "float32" if part == "ema" else source.precision.param_dtype
  own = jnp.dtype(program.cfg.precision.param_dtype)
  like = lambda x: jax.ShapeDtypeStruct(
    x.shape, stored if part == "ema" or x.dtype == own else x.dtype, sharding=x.sharding
  )
  chosen = int(init.step) if init.step.isdecimal() else init.step
  abstract = jax.tree.map(like, abstract_like(state.model, jax.sharding.get_mesh()))
  step, model, _ = restore_tree(
    init.folder / workdir.CHECKPOINTS, abstract, chosen, part, stacks=stacks(program.cfg)
  )
  model = jax.tree.map(lambda new, old: new.astype(old.dtype), model, state.model)
  logging.info("the weights are those of step %d of %s", step, init.folder)
  return _beginning_with(state, model)


def _beginning_with(state: TrainState, model: Any) -> TrainState:
  copied = lambda p: jnp.array(p, jnp.float32, copy=True)
  ema = None if state.ema is None else jax.tree.map(copied, model)
  return dataclasses.replace(state, model=model, ema=ema)


def open_log(
  stack: contextlib.ExitStack,
  program: Program,
  folder: Path,
  origin: Origin,
  meter: Throughput,
  identity: RunIdentity,
  train_set: TrainRows,
  dog: Watchdog,
) -> tuple[MetricWriter, StepLog]:
  """Where metrics go; rows of steps that are made again are cut off."""
  cfg, is_main = program.cfg, jax.process_index() == 0
  rows_until = origin.step if origin.restore else None
  writer = create_writer(cfg.log, folder, resume_step=rows_until, is_main=is_main, run=identity.run)
  stack.enter_context(contextlib.closing(writer))
  writer.write_hparams(flatten(cfg))
  progress = Progress(cfg.num_steps, start_step=origin.step, enabled=cfg.log.progress and is_main)
  stack.enter_context(progress)
  layers = None
  if is_main and (cfg.moe.num_experts or cfg.mod.routing != "none"):
    layers = LayerLog(folder / workdir.LAYERS, last_step=-1 if rows_until is None else rows_until)
    stack.enter_context(contextlib.closing(layers))
  acts = cfg.orchestrator.mode == "act"

  def derived(step: int, values: Mapping[str, float], arrays: Mapping[str, Any]):
    passes = train_set.passes(step * cfg.data.batch_size)
    found = worth(cfg, program.counts, program.training_rules(step), values, arrays)
    return found | of_sources(passes, values) | dog.metrics()

  log = StepLog(
    writer,
    meter,
    progress,
    cfg.log.every_steps,
    layers,
    derive=derived,
    raises=not acts,
  )
  return writer, stack.enter_context(log)


def open_watch(run: Run, snapshots: Snapshots) -> Supervisor | NoSupervisor:
  """The supervisor of a run, with a probe that is not trained on; or nobody."""
  if run.cfg.orchestrator.mode == "off":
    return NoSupervisor()
  mesh = jax.sharding.get_mesh()
  abstract = abstract_like(run.program.init(abstract=True), mesh)
  return Supervisor(
    run.program,
    probe_feed(run.cfg, run.eval_sets, run.train_set),
    run.folder / workdir.DECISIONS,
    run.writer.write_scalars,
    lambda: run.checkpoints.restore_latest(abstract),
    run.goodput.summary,
    snapshots,
    run,
  )


def speed(program: Program) -> Throughput:
  """A meter that knows the run's FLOPs and its devices' peak."""
  cfg = program.cfg
  return Throughput(
    num_devices=jax.device_count(),
    peak=peak_flops(jax.devices()[0].device_kind, cfg.precision.compute_dtype),
    tokens_per_step=cfg.data.batch_size * cfg.data.seq_len,
    flops_per_token=program.flops_per_token(cfg.data.seq_len),
  )
