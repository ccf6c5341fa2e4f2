"""Train a model: read a batch, take a step, watch, evaluate, save; repeat.

  ats-jax train
  ats-jax train --config=debug:moe --workdir=runs/moe --config.num_steps=1000
  ats-jax train --config=debug --workdir=runs/again --init_from=runs/debug
  ats-jax train --explain=model.num_layers

The same command goes on with a run that was stopped. Ctrl-C and SIGTERM end it after the step that
is being made, saved, with exit code 75; a second Ctrl-C ends it at once.
"""

import enum
from pathlib import PurePath

import jax
from absl import flags, logging

from ats_jax import cli, exits, job, paths, runtime
from ats_jax.bridge import hub
from ats_jax.config import Config
from ats_jax.config.build import explain
from ats_jax.fitting import smaller_micro_batch
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.paths import Path
from ats_jax.run import InitFrom, Run, open_run
from ats_jax.step.state import TrainState


class End(enum.Enum):
  """Why the loop ended."""

  DONE = enum.auto()
  STOPPED = enum.auto()  # by a signal
  OTHER_SETTINGS = enum.auto()  # the run goes on from its newest checkpoint, compiled anew


def train(cfg: Config, folder: Path, init: InitFrom | None = None) -> TrainState:
  """Train to `cfg.num_steps`, going on from the newest checkpoint in `folder` if there is one.

  Where the device's memory runs out and the orchestrator acts, the run goes on from its newest good
  state with half the micro-batch: an update is made of the same rows, so only rounding differs.

  Args:
    cfg: the run, as `from_config_dict` gives it.
    folder: its workdir.
    init: weights to begin with, of another run; None = random ones.

  Returns:
    The state at the end, or where a signal stopped the run after saving it.

  Raises:
    ValueError: for settings, data or a workdir that cannot be used.
    FloatingPointError: if the loss or the weights stop being finite, and the orchestrator, if it
      acts, does not mend it.
  """
  return train_to_end(cfg, folder, init)[0]


def train_to_end(cfg: Config, folder: Path, init: InitFrom | None = None) -> tuple[TrainState, End]:
  """As `train`; also why it ended: DONE or STOPPED."""
  snapshots, end, state = Snapshots.of(cfg.orchestrator), End.OTHER_SETTINGS, None
  while state is None:
    try:
      state, end = stretch(cfg, folder, snapshots, init)
    except jax.errors.JaxRuntimeError as error:
      cfg = smaller_micro_batch(cfg, folder, error)
  return state, end


def stretch(
  cfg: Config, folder: Path, snapshots: Snapshots, init: InitFrom | None
) -> tuple[TrainState | None, End]:
  """Open the run and train it; no state if it is to be opened again, with other settings."""
  with open_run(cfg, folder, snapshots, init) as run:
    end = loop(run)
    if end is End.OTHER_SETTINGS:
      return None, end
    run.finish(whole=end is End.DONE)
    state, by = run.state, run.stop.requested or "a signal to another process"
  if end is End.STOPPED:
    logging.info("%s: saved step %d. The same command goes on from there.", by, state.step)
  return state, end


def loop(run: Run) -> End:
  """Train an open run until it ends."""
  watch, last_step = run.watch, run.cfg.num_steps
  for step in range(run.step + 1, last_step + 1):
    train_step = run.compiled_step(step)
    batch = run.next_batch()
    with run.timed("step"):
      run.state, metrics = train_step(run.state, batch)
      run.took(step, metrics)
      run.state = watch.after(step, run.state, metrics)

    stopped = run.stop.agreed(step)
    ends = step == last_step or bool(stopped)
    saves = ends or watch.wants_checkpoint or due(step, run.cfg.checkpoint.every_steps)
    keeps = due(step, run.cfg.checkpoint.local_every)
    if saves or keeps:
      with run.aside("checkpoint"):
        run.state = watch.settle(step, run.state, metrics)  # what is known to be bad is not saved
    if step == last_step or due(step, run.cfg.eval.every_steps):
      run.evaluate()
    if saves or keeps:
      run.save(locally=not saves)
    if stopped:
      return End.STOPPED
    if watch.wants_restart:
      logging.info("orchestrator: other settings from step %d on; the step is compiled again", step)
      return End.OTHER_SETTINGS
  return End.DONE


def due(step: int, every: int) -> bool:
  """Whether something that happens each `every` steps (0 = never) happens at `step`."""
  return every > 0 and step % every == 0


FLAGS = flags.FlagValues()
CONFIG = cli.ConfigFlag(FLAGS)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run; default: that of the config in runs/.", flag_values=FLAGS
)
_EXPLAIN = flags.DEFINE_string(
  "explain",
  None,
  "Describe a setting or a section, e.g. model.num_layers, and end.",
  flag_values=FLAGS,
)
_INIT_FROM = flags.DEFINE_string(
  "init_from",
  None,
  "Workdir of a run of this program, or folder of Hugging Face's or hf://OWNER/NAME of its Hub, "
  "whose weights a new run begins with.",
  flag_values=FLAGS,
)
_INIT_STEP = flags.DEFINE_string(
  "init_step", "latest", "Its checkpoint: a step, 'latest' or 'best'.", flag_values=FLAGS
)


def default_workdir(config: str) -> str:
  """`configs/debug.py:moe` -> `runs/debug-moe`."""
  file, _, variant = config.partition(":")
  name = "-".join(filter(None, (PurePath(file).stem, variant)))
  logging.info("no --workdir is given: this is --workdir=runs/%s", name)
  return f"runs/{name}"


def main(argv: list[str]) -> int:
  """Train, or explain a setting."""
  del argv
  if _EXPLAIN.value is not None:
    print(explain(_EXPLAIN.value))
    return exits.DONE
  cfg = CONFIG.value
  folder = paths.parse(_WORKDIR.value or default_workdir(CONFIG.file))
  if FLAGS["init_step"].present and not _INIT_FROM.value:
    raise ValueError("--init_step says which checkpoint of --init_from; that is missing.")
  source = _INIT_FROM.value
  init = InitFrom(paths.parse(hub.local(source)), _INIT_STEP.value) if source else None
  with runtime.configured(cfg):
    job.join(cfg)
    _, end = train_to_end(cfg, folder, init)
  return exits.STOPPED if end is End.STOPPED else exits.DONE


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
if __name__ == "__main__":
  cli.main("train", COMMANDS)
