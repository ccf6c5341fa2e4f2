"""The command `bridge train`."""

from typing import Any

import jax
from absl import flags

from ats_jax import exits
from ats_jax.bridge.convert import config_of
from ats_jax.bridge.folder import is_model_folder
from ats_jax.checkpoint import workdir
from ats_jax.config import Config
from ats_jax.config.extend import build
from ats_jax.config.names import flatten, to_dict
from ats_jax.config.tree import updated
from ats_jax.config.validate import check_given
from ats_jax.store import paths
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.verbs import cli

ABOUT = """train or fine-tune with PyTorch, on a Mac or any GPU that it knows

  ats-jax bridge train --workdir=runs/mac --device=mps --config=debug
  ats-jax bridge train --workdir=runs/tuned --init_from=FOLDER --config.data.paths=my.txt
  ats-jax bridge train --workdir=runs/tuned --init_from=runs/long --device=cuda --compile

A run of this program: the same command goes on with it, `ats-jax train` too, and generate,
evaluate, forecast and export read its workdir. Without --config the model is that of --init_from.
"""
FLAGS = flags.FlagValues()
_CONFIG = cli.ConfigFlag(FLAGS)
_WORKDIR = cli.define_workdir_flag(FLAGS)
_DEVICE = flags.DEFINE_string("device", "cpu", "Where: cpu, cuda or mps.", flag_values=FLAGS)
_DTYPE = flags.DEFINE_string(
  "dtype",
  "",
  "Of matmuls: float32, bfloat16 or float16; by default precision.compute_dtype, on mps float16 in "
  "the place of bfloat16.",
  flag_values=FLAGS,
)
_COMPILE = flags.DEFINE_bool("compile", False, "Compile by torch.compile.", flag_values=FLAGS)
_INIT_FROM = flags.DEFINE_string(
  "init_from",
  None,
  "Workdir of a run, folder of Hugging Face's or of our own format, or hf://OWNER/NAME of the Hub, "
  "whose weights a new run begins with.",
  flag_values=FLAGS,
)
_INIT_STEP = flags.DEFINE_string(
  "init_step", "latest", "Its checkpoint: a step, 'latest' or 'best'.", flag_values=FLAGS
)
_IGNORED = cli.define_ignored_fields_flag(FLAGS)
_RANK = flags.DEFINE_integer(
  "lora_rank",
  0,
  "Train adapters of this rank, by peft, instead of the model; 0 = the model.",
  lower_bound=0,
  flag_values=FLAGS,
)
_ALPHA = flags.DEFINE_float(
  "lora_alpha", 16.0, "Adapters are multiplied with this over their rank.", flag_values=FLAGS
)
_TARGETS = flags.DEFINE_list(
  "lora_targets", ["q", "k", "v", "out"], "Linear layers that have one.", flag_values=FLAGS
)


def main(argv: list[str]) -> int:
  """Train with PyTorch."""
  del argv
  try:
    from ats_jax.pytorch.training import device, loop, lora
  except ModuleNotFoundError as e:
    if e.name != "torch":
      raise
    raise ValueError("bridge train needs PyTorch: pip install 'ats_jax[torch]'.") from e
  # It holds the state for checkpoints only: no device's memory is to be taken for that.
  jax.config.update("jax_platforms", "cpu")
  target = paths.parse(cli.require(_WORKDIR.value, "workdir", "runs/torch"))
  source = _INIT_FROM.value
  init = InitialWeights.of(source, _INIT_STEP.value, _IGNORED.value) if source else None
  given = frozenset(_CONFIG.given())
  if init is not None and not FLAGS["config"].present:
    cfg = build(_CONFIG.applied(beginning_with(init)))
  else:
    cfg = build(_CONFIG.nested())
  for check in (check_given, loop.check_given):
    check(cfg, given, lambda: workdir.stored_settings(target))
  where = device.find_device(_DEVICE.value)
  cfg = device.fit_device(cfg, where, given)
  rank, adapters = _RANK.value, None
  if rank:
    if init is None:
      raise ValueError("--lora_rank adapts a model: --init_from says which.")
    adapters = lora.Lora(rank, _ALPHA.value, tuple(_TARGETS.value))
  dtype = device.format_of(cfg, where, _DTYPE.value)
  options = loop.Options(where, dtype, _COMPILE.value, adapters)
  done = loop.train(cfg, target, options, init)
  return exits.DONE if done else exits.STOPPED


def beginning_with(init: InitialWeights) -> dict[str, Any]:
  """Settings of a run that goes on with these weights: their model and its tokenizer.

  Matmuls are in the format that they were in there, but for float16, which --dtype names; weights
  are in float32.
  """
  folder = init.folder
  if is_model_folder(folder):
    source = config_of(init.source)
    tokenizer = source.data.tokenizer
  else:
    source = workdir.load_config(folder)
    tokenizer = str(folder / workdir.TOKENIZER)
  kept = {n: v for n, v in flatten(source).items() if n.split(".")[0] in ("model", "moe", "mod")}
  kept |= {"data.tokenizer": tokenizer, "data.seq_len": source.data.seq_len}
  if source.precision.compute_dtype in ("float32", "bfloat16"):
    kept["precision.compute_dtype"] = source.precision.compute_dtype
  return updated(to_dict(Config()), kept)


TRAIN = cli.Command(main, FLAGS, ABOUT)
