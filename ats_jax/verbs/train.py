"""Train a model, or go on with a run.

  ats-jax train
  ats-jax train --config=debug:moe --workdir=runs/moe --config.num_steps=1000
  ats-jax train --config=debug --workdir=runs/again --init_from=runs/debug
  ats-jax train --explain=model.num_layers

The same command goes on with a run that was stopped. Ctrl-C and SIGTERM end it after the step that
is being made, saved, with exit code 75; a second Ctrl-C ends it at once.
"""

from pathlib import PurePath

from absl import flags, logging

from ats_jax import exits
from ats_jax.checkpoint import workdir
from ats_jax.cluster import job, runtime
from ats_jax.config import Config
from ats_jax.config.build import extensions_of
from ats_jax.config.extend import build, load
from ats_jax.config.validate import check_given
from ats_jax.store import paths
from ats_jax.train.loop import End, train_to_end
from ats_jax.verbs import cli

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
_INIT_ADAPTER = flags.DEFINE_string(
  "init_adapter",
  "",
  "Folder of peft's with the adapters that a new run with finetune.adapter begins with.",
  flag_values=FLAGS,
)
_INIT_ROUTER = flags.DEFINE_string(
  "init_router",
  "",
  "Workdir of a run whose routers replace those of --init_from, layer by layer.",
  flag_values=FLAGS,
)
_RESUME_STEP = flags.DEFINE_integer(
  "resume_step",
  None,
  "Go on from this checkpoint of the workdir, with its optimizer; later ones are set aside.",
  lower_bound=0,
  flag_values=FLAGS,
)
_IGNORED = cli.define_ignored_fields_flag(FLAGS)


def default_workdir(config: str) -> str:
  """`configs/debug.py:moe` -> `runs/debug-moe`."""
  file, _, variant = config.partition(":")
  name = "-".join(filter(None, (PurePath(file).stem, variant)))
  logging.info("no --workdir is given: this is --workdir=runs/%s", name)
  return f"runs/{name}"


def asked_for() -> Config:
  """The run that the flags ask for.

  Raises:
    ValueError: as `ConfigFlag.value`, but for what the run in the workdir was begun with.
  """
  cfg = build(CONFIG.nested())
  check_given(cfg, CONFIG.given(), lambda: workdir.stored_settings(_folder()))
  return cfg


def _folder() -> paths.Path:
  return paths.parse(_WORKDIR.value or default_workdir(CONFIG.file))


def main(argv: list[str]) -> int:
  """Train, or explain a setting."""
  del argv
  if _EXPLAIN.value is not None:
    from ats_jax.config.explain import explain  # here: a run explains nothing

    if FLAGS["config"].present:
      load(extensions_of(CONFIG.nested()))  # they may bring settings
    print(explain(_EXPLAIN.value))
    return exits.DONE
  cfg, folder = asked_for(), _folder()
  if FLAGS["init_step"].present and not _INIT_FROM.value:
    raise ValueError("--init_step says which checkpoint of --init_from; that is missing.")
  if _INIT_ADAPTER.value and not _INIT_FROM.value:
    raise ValueError("--init_adapter is for the weights of --init_from; that is missing.")
  if _INIT_ROUTER.value and not _INIT_FROM.value:
    raise ValueError("--init_router is for the weights of --init_from; that is missing.")
  if _RESUME_STEP.value is not None and _INIT_FROM.value:
    raise ValueError("--resume_step goes on with a run, --init_from begins one. Give one of them.")
  initial = None
  if _INIT_FROM.value:
    from ats_jax.train.initial_weights import InitialWeights  # here: it reads other formats

    initial = InitialWeights.of(
      _INIT_FROM.value,
      _INIT_STEP.value,
      _IGNORED.value,
      _INIT_ADAPTER.value,
      _INIT_ROUTER.value,
    )
  with runtime.configured(cfg):
    job.join(cfg)
    _, end = train_to_end(cfg, folder, initial, _RESUME_STEP.value)
  return code_of(end)


def code_of(end: End) -> int:
  """The exit code of a training that ended."""
  return exits.STOPPED if end is End.STOPPED else exits.DONE


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
