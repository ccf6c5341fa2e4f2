"""Opening a run: its parts, in the order in which each needs those before it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from ats_jax.checkpoint import CheckpointManager, StopSignal, abstract_like, workdir
from ats_jax.checkpoint.rest import Rest
from ats_jax.cluster.liveness.watchdog import READING, Watchdog, open_watchdog
from ats_jax.config import Config
from ats_jax.config.build import CHANGES, resolve, with_changes
from ats_jax.config.extend import load_extensions
from ats_jax.config.identity import RunIdentity
from ats_jax.config.names import flatten
from ats_jax.data.batch import POSITION
from ats_jax.data.rows.contract import TrainRows
from ats_jax.data.sources import HELD_OUT, check_same_text, open_data, open_eval_sets
from ats_jax.data.tokens.file import save_tokenizer
from ats_jax.extensions import losses
from ats_jax.metrics import logfile
from ats_jax.metrics.create import create_writer
from ats_jax.metrics.files import LayerLog
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.peaks import peak_flops
from ats_jax.metrics.profiler import ProfileWindow
from ats_jax.metrics.progress import ProgressBar
from ats_jax.metrics.steplog import StepLog
from ats_jax.metrics.throughput import Throughput
from ats_jax.metrics.watcher import Watcher
from ats_jax.metrics.writer import MetricWriter, MultiWriter
from ats_jax.model.layout import stacks
from ats_jax.ops.requirements import this_device, with_compute_dtype
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.by_source import source_metrics
from ats_jax.step.course import Course
from ats_jax.step.program import COMPUTE_DTYPE, Program, make_program
from ats_jax.step.sparse_value import sparse_value_metrics
from ats_jax.step.state import TrainState
from ats_jax.store.paths import Path
from ats_jax.train import report
from ats_jax.train.compiled import CompiledSteps, Key, PendingStep, begin_compiling
from ats_jax.train.feed import train_feed
from ats_jax.train.fields import sets_with_fields, with_fields
from ats_jax.train.num_steps import rows_read, with_num_steps, with_phase_steps
from ats_jax.train.resize import DEVICES, resize_to_devices, with_smaller_micro_batch
from ats_jax.train.run import FolderWatch, Run

if TYPE_CHECKING:  # imported by the runs that have them
  from ats_jax.orchestrator.trials.snapshots import Snapshots
  from ats_jax.train.initial_weights import InitialWeights

PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class ResumePoint:
  """The checkpoint, snapshot or step 0 from which a run starts.

  Attributes:
    step: number of updates done there.
    extra: JSON that was saved with the state; {} at the beginning.
    restore: maps shapes, dtypes and shardings to the saved state; None = the run is new.
  """

  step: int = 0
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  restore: Callable[[TrainState], TrainState] | None = None


@contextlib.contextmanager
def open_run(
  cfg: Config,
  folder: Path,
  snapshots: "Snapshots | None" = None,
  initial: "InitialWeights | None" = None,
  resume_step: int | None = None,
) -> Iterator[Run]:
  """Open a run where it goes on: from its newest good state, or else from the beginning.

  The order is that of need. Claim the workdir. Find the newest state, which may have been made with
  other settings. Open the data, which tells the vocabulary. Make the mesh and the program. Read on
  from the state's position, which tells the shape of the next batch. Begin to compile, and
  meanwhile restore the state, cut the logs to its step, and open what follows the run.

  Args:
    cfg: the run, as its user wrote it.
    folder: workdir of the run.
    snapshots: states in host memory, empty at first; they outlive a run that is opened again. A run
      with an orchestrator needs them.
    initial: weights to begin with; a run that goes on has its own.
    resume_step: the checkpoint to go on from in place of the newest one.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
  """
  goodput, folder = Goodput(), Path(folder)
  cfg = load_extensions(cfg)
  with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    enter(logfile.verbosity(cfg.log))
    identity = enter(workdir.claim(folder, cfg))
    enter(logfile.log_to_file(folder, jax.process_index()))
    cfg = with_smaller_micro_batch(cfg, folder)
    watchdog = enter(open_watchdog(cfg, goodput, folder))
    directory = folder / workdir.CHECKPOINTS
    checkpoints = enter(
      CheckpointManager(directory, cfg.checkpoint, identity, stacks(cfg), str(cfg.mesh))
    )
    if resume_step is not None:
      checkpoints.go_back_to(resume_step)
    origin = find_resume_point(checkpoints, snapshots)
    if initial is not None and origin.restore is None:
      initial.check(cfg)
    elif origin.restore is None and cfg.finetune.adapter.name != "none":
      raise ValueError(
        f"finetune.adapter.name={cfg.finetune.adapter.name} trains beside weights that are frozen, "
        "and random ones are of no use. Say which weights with --init_from."
      )
    with watchdog.during(READING):
      train_set, valid_set = open_data(cfg.data, cfg.seed)
      eval_sets = open_eval_sets(cfg.data, valid_set)
    done = rows_read(cfg, train_set, origin.step, origin.extra)
    check_same_text(eval_sets, origin.extra.get(HELD_OUT, {}))
    cfg, length = with_num_steps(cfg, train_set, done)
    workdir.write_config(folder, cfg)
    cfg = with_phase_steps(cfg, train_set)
    began_in = origin.extra.get(COMPUTE_DTYPE, "bfloat16") if origin.restore else ""
    cfg = with_compute_dtype(cfg, this_device(), began_in)
    cfg = with_changes(cfg, origin.extra.get(CHANGES, {}))
    cfg = resolve(cfg, train_set.info.tokenizer.vocab_size)
    cfg, devices = resize_to_devices(cfg, origin.extra.get(DEVICES))
    mesh = make_mesh(cfg)
    enter(on_mesh(cfg, mesh))
    stop = enter(StopSignal())
    program = make_program(cfg, losses.find(cfg.step.loss.name)(cfg)).continued(origin.extra)
    checkpoints.rest = rest_of(program, folder, origin, initial, train_set)
    state = None
    if cfg.step.loss.ROWS:  # before rows are read ahead
      if origin.restore is None:
        state = restored_or_new(program, origin, initial, train_set)
      first_weights = None if state is None else state.model
      train_set = with_fields(program, folder, first_weights, train_set)
      eval_sets = sets_with_fields(program, folder, first_weights, eval_sets)
    batches = enter(
      train_feed(cfg, train_set, origin.extra.get(POSITION), tells=True, on_mesh=True)
    )
    first = Key(program.training_rules(origin.step + 1), batches.row_length)
    ended = origin.step >= cfg.num_steps
    steps = CompiledSteps(PendingStep() if ended else begin_compiling(program, first))
    if state is None:
      state = restored_or_new(program, origin, initial, train_set)
    if jax.process_index() == 0:
      save_tokenizer(train_set.info.tokenizer, folder / workdir.TOKENIZER)
      if origin.restore is None:
        report.keep_data_facts(folder, train_set, valid_set)
      if initial is not None and origin.restore is None:
        initial.keep_companions(folder)
    first_row = batches.position()["row"]
    course = Course(cfg, origin.step, first_row)
    report.opening(program, folder, state, train_set, course, length)
    is_main = jax.process_index() == 0
    progress = enter(
      ProgressBar(cfg.num_steps, start_step=origin.step, enabled=cfg.log.progress and is_main)
    )
    writer = open_writer(stack, cfg, folder, origin, identity, progress)
    meter = speed(program)
    log = open_log(
      stack, program, folder, origin, meter, writer, progress, train_set, watchdog, course
    )
    profile = enter(
      ProfileWindow(
        cfg.log.profile_step, PROFILED_STEPS, folder / workdir.PROFILES, cfg.log.profile_every
      )
    )
    run = Run(
      program=program,
      folder=folder,
      state=state,
      step=origin.step,
      steps=steps,
      train_set=train_set,
      valid_set=valid_set,
      eval_sets=eval_sets,
      batches=batches,
      devices=devices,
      checkpoints=checkpoints,
      stop=stop,
      writer=writer,
      goodput=goodput,
      meter=meter,
      watchers=(
        FolderWatch(checkpoints, cfg.log.every_steps),
        watchdog,
        _device_watch(cfg.log.every_steps),
        _scale_watch(cfg),
        profile,
        log,
        meter,
        goodput,
      ),
    )
    if cfg.orchestrator.mode != "off":
      from ats_jax.train.supervise import open_supervisor

      assert snapshots is not None, "a run with an orchestrator has snapshots"
      run.supervisor = enter(contextlib.closing(open_supervisor(run, snapshots)))
    run.watchers = (*run.watchers, run.supervisor)
    run.supervisor.start(origin.step, state, origin.extra)
    stack.push(watchdog.take_error)  # the others hear of it before anything here waits for them
    try:
      yield run
    finally:
      # The supervisor holds the run: that cycle would keep the state on the devices.
      run.supervisor, run.watchers = NoSupervisor(), ()


def open_snapshots(cfg: Config) -> "Snapshots | None":
  """Where states are kept in host memory, to go back to; None without an orchestrator."""
  if cfg.orchestrator.mode == "off":
    return None
  from ats_jax.orchestrator.trials.snapshots import Snapshots

  return Snapshots.of(cfg.orchestrator)


def find_resume_point(checkpoints: CheckpointManager, snapshots: "Snapshots | None") -> ResumePoint:
  """The newest state there is: a snapshot in host memory, or else an intact checkpoint."""
  snapshot = None if snapshots is None else snapshots.newest(checkpoints.steps())
  if snapshot is not None:
    step, state, extra = snapshot
    # With smaller micro-batches (`with_smaller_micro_batch`) the structure is another one, of the
    # same arrays.
    as_now = lambda abstract: jax.tree.unflatten(
      jax.tree.structure(abstract), jax.tree.leaves(state)
    )
    return ResumePoint(step, extra, as_now)
  newest = checkpoints.newest()
  if newest is None:
    return ResumePoint()
  step, extra = newest
  return ResumePoint(step, extra, lambda abstract: checkpoints.read(step, abstract))


def rest_of(
  program: Program,
  folder: Path,
  origin: ResumePoint,
  initial: "InitialWeights | None",
  train_set: TrainRows,
) -> Rest:
  """What checkpoints leave out: with adapters the frozen weights, if the run began without them.

  `--init_router` replaces some of these, so that no folder has them all.
  """
  tokenizer = train_set.info.tokenizer
  if program.cfg.finetune.adapter.name == "none":
    return Rest()
  from ats_jax.inference.base import BASE, Base  # here: few runs have adapters

  if origin.restore is not None:
    named, given = origin.extra.get(BASE), None if initial is None else initial.folder
    return Base.named(named, program, tokenizer, folder, folder=given) if named else Rest()
  assert initial is not None, "adapters need weights to begin with"
  return Rest() if initial.router else Base.at_first(initial, program, tokenizer, folder)


def restored_or_new(
  program: Program, origin: ResumePoint, initial: "InitialWeights | None", train_set: TrainRows
) -> TrainState:
  """The state of `origin`; at the beginning a new one, with the `initial` weights if given."""
  if origin.restore is not None:
    abstract = abstract_like(program.init(abstract=True), jax.sharding.get_mesh())
    return origin.restore(abstract)
  model = None if initial is None else initial.load(program, train_set.info.tokenizer)
  state = program.init(model=model)
  return state if initial is None else initial.with_adapter(program, state)


def open_writer(
  stack: contextlib.ExitStack,
  cfg: Config,
  folder: Path,
  origin: ResumePoint,
  identity: RunIdentity,
  progress: ProgressBar,
) -> MetricWriter:
  """Where metrics go; rows of steps that are made again are cut off."""
  writer = create_writer(
    cfg.log,
    folder,
    resume_step=origin.step if origin.restore else None,
    is_main=jax.process_index() == 0,
    run=identity.run,
  )
  stack.enter_context(contextlib.closing(writer))
  writer.write_hparams(flatten(cfg))
  return MultiWriter([writer, progress])


def open_log(
  stack: contextlib.ExitStack,
  program: Program,
  folder: Path,
  origin: ResumePoint,
  meter: Throughput,
  writer: MetricWriter,
  progress: ProgressBar,
  train_set: TrainRows,
  watchdog: Watchdog,
  course: Course,
) -> StepLog:
  """The log of the steps' metrics, and of those that follow from them."""
  cfg, is_main = program.cfg, jax.process_index() == 0
  layers = None
  if is_main and (cfg.moe.num_experts or cfg.mod.routing != "none"):
    layers = LayerLog(folder / workdir.LAYERS, last_step=origin.step if origin.restore else -1)
    stack.enter_context(contextlib.closing(layers))

  def derived(step: int, values: Mapping[str, float], arrays: Mapping[str, Any]):
    passes = train_set.progress(course.row(step)).passes
    figures = sparse_value_metrics(
      cfg, program.counts, program.training_rules(step), values, arrays
    )
    figures |= source_metrics(passes, values)
    if program.objective.ITEMS != "tokens":
      figures["train/perplexity"] = None
    return figures | course.metrics(step, values) | watchdog.metrics()

  log = StepLog(
    writer,
    meter,
    progress,
    cfg.log.every_steps,
    layers,
    derive=derived,
    raises=cfg.orchestrator.mode != "act",
  )
  return stack.enter_context(log)


def speed(program: Program) -> Throughput:
  """A meter that knows the run's FLOPs and its devices' peak."""
  cfg = program.cfg
  return Throughput(
    num_devices=jax.device_count(),
    peak=peak_flops(jax.devices()[0].device_kind, cfg.precision.compute_dtype),
    rows_per_step=cfg.data.batch_size,
    tokens_per_step=cfg.data.batch_size * cfg.data.seq_len,
    flops_per_token=program.flops_per_token(cfg.data.seq_len),
  )


def _device_watch(every_steps: int) -> Watcher:
  """The watch over GPUs, where there are any."""
  if jax.default_backend() != "gpu":
    return Watcher()
  from ats_jax.cluster.liveness.device_watch import open_device_watch

  return open_device_watch(every_steps)


def _scale_watch(cfg: Config) -> Watcher:
  """The watch over the scale of the loss, where there is one."""
  if cfg.precision.scaling is None:
    return Watcher()
  from ats_jax.metrics.loss_scale import ScaleWatch

  return ScaleWatch(cfg.log.every_steps)
