"""Train a model: read a batch, take a step, log, evaluate, checkpoint; repeat.

python -m ats_jax.train --config=configs/debug.py --workdir=runs/debug [--config.section.name=value]
"""

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path

import jax
from absl import flags, logging

from ats_jax import report, runtime, workdir
from ats_jax.checkpoint import CheckpointManager, StopSignal, abstract_like
from ats_jax.config import Config, from_config_dict
from ats_jax.config.build import CHANGES, explain, resolve, with_changes
from ats_jax.data.splits import open_datasets
from ats_jax.data.tokenizer_file import save_tokenizer
from ats_jax.feed import global_feed, probe_batch, train_feed
from ats_jax.metrics.goodput import Goodput
from ats_jax.metrics.profiler import ProfileWindow
from ats_jax.metrics.progress import Progress
from ats_jax.metrics.steplog import StepLog
from ats_jax.metrics.writer import create_writer
from ats_jax.orchestrator.actions.settings import Restart
from ats_jax.orchestrator.relief import relieved
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.paired import Ahead
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.scoring import check_fp8, score
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.metrics import metric_names
from ats_jax.step.program import make_program
from ats_jax.step.state import TrainState

PROFILED_STEPS = 3


@relieved
def train(cfg: Config, folder: Path, snapshots: Snapshots) -> TrainState:
  """Train to `cfg.num_steps`, going on from the newest checkpoint in `folder` if there is one.

  Args:
    cfg: the run, as `from_config_dict` gives it.
    folder: its workdir.
    snapshots: states in host memory, empty at first; `relieved` gives them.

  Returns:
    The state at the end, or where a signal stopped the run after saving it.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
    FloatingPointError: if the loss or the weights stop being finite, and the orchestrator, if it
      acts, does not mend it.
  """
  goodput = Goodput()
  runtime.configure(cfg)
  runtime.join_job(cfg)
  with ExitStack() as stack:
    enter = stack.enter_context
    identity = enter(workdir.claim(folder, cfg))
    checkpoints = enter(CheckpointManager(folder / workdir.CHECKPOINTS, cfg.checkpoint, identity))
    changes = checkpoints.latest_extra().get(CHANGES, {})
    cfg = with_changes(cfg, changes)
    train_set, valid_set = open_datasets(cfg.data, cfg.seed)
    cfg = resolve(cfg, train_set.tokenizer.vocab_size)
    mesh = make_mesh(cfg)
    enter(jax.set_mesh(mesh))
    stop = enter(StopSignal())
    program = make_program(cfg)
    abstract = abstract_like(program.init(abstract=True), mesh)
    kept = snapshots.newest(checkpoints.steps())
    restored = kept or checkpoints.restore_latest(abstract)
    first_position = {"row": 0, "data": train_set.fingerprint}
    start, state, position = restored or (0, program.init(), first_position)
    if position.get(CHANGES, {}) != changes:
      raise Restart(f"checkpoint {start} was made with other settings than a newer, damaged one")
    program = dataclasses.replace(program, fp8=position.get("fp8", True))
    workdir.check_data(folder, position["data"], train_set.fingerprint)
    if is_main := jax.process_index() == 0:
      save_tokenizer(train_set.tokenizer, folder / workdir.TOKENIZER)
    batches = enter(train_feed(cfg, train_set, position["row"]))  # starts reading
    report.opening(program, folder, state.model, train_set, start)

    rows_until = start if restored else None
    writer = enter(closing(create_writer(cfg.log, folder, resume_step=rows_until, is_main=is_main)))
    progress = enter(Progress(cfg.num_steps, start_step=start, enabled=cfg.log.progress))
    profile = enter(ProfileWindow(cfg.log.profile_step, PROFILED_STEPS, folder / "profile"))
    layers = enter(report.layer_log(program, folder, rows_until))
    probe = probe_batch(cfg, valid_set if valid_set.num_rows else train_set)
    ledger = folder / workdir.DECISIONS
    restore = lambda: checkpoints.restore_latest(abstract)
    write, totals = writer.write_scalars, goodput.summary
    supervisor = enter(Supervisor(program, probe, ledger, write, restore, totals, snapshots))
    supervisor.start(start, state, position)
    names, every, acts = metric_names(cfg), cfg.log.every_steps, supervisor.acts
    meter = report.speed(program)
    log = StepLog(names, writer, meter, progress, every, layers, raises=not acts)
    enter(log)
    train_step, rules = program.train_step, None
    upcoming = lambda: global_feed(cfg, train_set, position["row"])
    stopped = scores = None

    for step in range(start + 1, cfg.num_steps + 1):
      if rules != program.training_rules(step):  # at first; mod.capacity fell; 8 bits are off
        with log.pause(step - 1), goodput.timed("compile"):
          rules = program.training_rules(step)
          train_step = program.compile_train_step(state, rules)
          supervisor.follow(program, step, state)
      with goodput.timed("data_wait"):
        batch = to_global(next(batches), mesh)
      profile.before(step, state)
      with goodput.timed("step"):
        state, metrics = train_step(state, batch)
        position["row"] += cfg.data.batch_size
        log.push(step, *metrics)
        again = lambda state, run=train_step, batch=batch: run(state, batch)
        state = supervisor.after(step, state, metrics, position, again)

      last, stopped, scores = step == cfg.num_steps, stop.agreed(step), None
      due_now = supervisor.wants_checkpoint or due(step, cfg.checkpoint.every_steps)
      if saves := last or stopped or due_now:
        with log.pause(step), goodput.timed("checkpoint"):
          state = supervisor.settle(step, state, metrics, Ahead(train_step, upcoming))
      if valid_set.num_rows and (last or due(step, cfg.eval.every_steps)):
        with log.pause(step), goodput.timed("eval"):
          scores = score(program, state.weights, valid_set, step)
          writer.write_scalars(step, scores)
          program = check_fp8(program, scores)
          if not program.fp8:
            position["fp8"] = False
      if saves:
        with log.pause(step), goodput.timed("checkpoint"):
          loss = scores["eval/loss"] if scores else None
          checkpoints.save(step, state, position | supervisor.saved(), metric=loss)
          writer.write_scalars(step, {"checkpoint/stall_secs": checkpoints.last_save_stall_secs})
      if stopped:
        break
      if supervisor.wants_restart:
        checkpoints.wait()
        raise Restart(f"other settings from step {step} on; the step is compiled again")

    if not stopped:
      with goodput.timed("sample"):
        report.closing(program, folder, state, train_set, valid_set, scores)
    with goodput.timed("checkpoint"):
      checkpoints.wait()
    writer.write_scalars(int(state.step), goodput.summary())
    stats = report.get_performance_stats(program, goodput, meter, train_step)
    logging.info("%s\n%s", report.performance(stats), goodput.line())
    if is_main:
      workdir.write_json(folder / workdir.PERFORMANCE, stats)
  if stopped:
    logging.info("%s: saved step %d. The same command goes on from there.", stopped, state.step)
  return state


def due(step: int, every: int) -> bool:
  """Whether something that happens each `every` steps (0 = never) happens at `step`."""
  return every > 0 and step % every == 0


_CONFIG = runtime.define_config_flag()
_WORKDIR = runtime.define_workdir_flag()
_EXPLAIN = flags.DEFINE_string(
  "explain", None, "Describe a setting or a section, e.g. model.num_layers."
)


def main(argv: list[str]) -> None:
  """Train, or explain a setting."""
  del argv
  if _EXPLAIN.value:
    print(explain(_EXPLAIN.value))
    return
  config = runtime.require(_CONFIG.value, "config", "configs/debug.py")
  folder = runtime.require(_WORKDIR.value, "workdir", "runs/debug")
  train(from_config_dict(config), Path(folder))


if __name__ == "__main__":
  runtime.run(main)
