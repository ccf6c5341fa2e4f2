"""Weights from and to Hugging Face and PyTorch."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags, logging

from ats_jax import cli, exits, paths, runtime, workdir
from ats_jax.bridge import hub
from ats_jax.bridge.convert import ASIDE, COMPANIONS, import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.family import names
from ats_jax.bridge.parity import compare
from ats_jax.checkpoint import abstract_like, restore_tree
from ats_jax.config.build import resolve
from ats_jax.data.tokenizer_file import load_tokenizer
from ats_jax.inference.load import as_data, fit_devices
from ats_jax.model.layout import stacks
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import make_program
from ats_jax.torch_run.command import TRAIN

# What counts as the same model: see docs/guides/bridge.md.
MOST = {"float32": (1e-4, 1e-6), "bfloat16": (float("inf"), 1e-3)}

IMPORT = """a workdir whose checkpoint 0 holds the weights of a folder

  ats-jax bridge import --folder=FOLDER --workdir=runs/imported
  ats-jax bridge import --folder=hf://Qwen/Qwen3-0.6B --workdir=runs/imported
  ats-jax bridge import --folder=FOLDER --workdir=runs/imported --tokenizer=bytes

After a kill the same command goes on.
"""
EXPORT = """a folder for transformers and vLLM, of a run's weights

  ats-jax bridge export --workdir=runs/debug --folder=FOLDER
  ats-jax bridge export --workdir=runs/debug --folder=FOLDER --step=best --family=llama

After a kill the same command goes on.
"""
VERIFY = """logits and greedy tokens of a run beside those of transformers

  ats-jax bridge verify --workdir=runs/imported --folder=FOLDER

Exit code 1 if they differ.
"""
_FOR_IMPORT, _FOR_EXPORT, _FOR_VERIFY = (flags.FlagValues() for _ in range(3))
for _own in (_FOR_IMPORT, _FOR_EXPORT, _FOR_VERIFY):
  cli.define_workdir_flag(_own)
  flags.DEFINE_string(
    "folder",
    None,
    "Folder of Hugging Face's: config.json and weights; or hf://OWNER/NAME of the Hub.",
    flag_values=_own,
  )
_STEP, _STEP_TO_VERIFY = cli.define_step_flag(_FOR_EXPORT), cli.define_step_flag(_FOR_VERIFY)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  "",
  "'bytes', a tokenizer.json, a .model or a .tiktoken file, where the folder has none.",
  flag_values=_FOR_IMPORT,
)
_KEPT_IN = flags.DEFINE_string(
  "dtype",
  "",
  "Of the weights: float32 or bfloat16; by default as in the files, float16 in float32.",
  flag_values=_FOR_IMPORT,
)
_FAMILY = flags.DEFINE_string(
  "family", "", "The model_type; by default the first that fits.", flag_values=_FOR_EXPORT
)
_WRITTEN_IN = flags.DEFINE_string(
  "dtype",
  "",
  "Of the weights: float32, bfloat16 or float16; by default that of the import, or as they are.",
  flag_values=_FOR_EXPORT,
)
_SHARD_GB = flags.DEFINE_float(
  "shard_gb",
  5.0,
  "A file holds at most this many GB, or one tensor.",
  lower_bound=0.0,
  flag_values=_FOR_EXPORT,
)
_COMPUTED_IN = flags.DEFINE_string(
  "dtype", "float32", "Both compute in float32 or bfloat16.", flag_values=_FOR_VERIFY
)
_SEQ_LEN = flags.DEFINE_integer(
  "seq_len", 128, "Tokens of a row.", lower_bound=2, flag_values=_FOR_VERIFY
)


def _one_of(dtype: str, *known: str) -> str:
  if dtype and dtype not in known:
    raise ValueError(f"--dtype={dtype} is unknown. Choose one of: {', '.join(known)}.")
  return dtype


def _import(folder: Path, target: paths.Path) -> bool:
  dtype = _one_of(_KEPT_IN.value, "float32", "bfloat16")
  report = import_folder(folder, target, param_dtype=dtype, tokenizer=_TOKENIZER.value)
  print(
    f"{report['family']}: {report['parameters']:,} parameters, {report['bytes'] / 2**30:.2f} GiB "
    f"read; {report['resumed']} arrays were there already"
  )
  if report["aside"]:
    print(
      f"left aside, as no model here has them: {len(report['aside'])} tensors, "
      f"{names(report['aside'])}; all are named in {target}/{COMPANIONS}/{ASIDE}"
    )
  print(f"step 0 of {target}; train on it with --init_from={target}")
  return True


def _export(folder: Path, source: paths.Path) -> bool:
  report = export(
    source,
    folder,
    step=_STEP.value,
    family=_FAMILY.value,
    dtype=_one_of(_WRITTEN_IN.value, "float32", "bfloat16", "float16"),
    shard_bytes=int(_SHARD_GB.value * 1e9),
  )
  print(
    f"step {report['step']} as {report['family']}: {report['parameters']:,} parameters in "
    f"{report['files']} files, of which {report['resumed']} were there already"
  )
  if report["aside"]:
    print(f"not in it, as the import left them aside: {len(report['aside'])} tensors")
  return True


def _verify(folder: Path, source: paths.Path) -> bool:
  dtype, asked = _one_of(_COMPUTED_IN.value, *MOST), _STEP_TO_VERIFY.value
  cfg = as_data(workdir.load_config(source))
  cfg = dataclasses.replace(
    cfg, precision=dataclasses.replace(cfg.precision, compute_dtype=dtype, fp8=False)
  )
  runtime.configure(cfg)
  words = load_tokenizer(source / workdir.TOKENIZER)
  cfg = fit_devices(resolve(cfg, words.vocab_size), jax.device_count())
  mesh = make_mesh(cfg)
  with jax.set_mesh(mesh):
    program = make_program(cfg)
    part = "ema" if cfg.optimizer.ema_decay else "model"
    abstract = abstract_like(getattr(program.init(abstract=True), part), mesh)
    step = int(asked) if asked.isdecimal() else asked
    checkpoints, run = source / workdir.CHECKPOINTS, workdir.load_identity(source)
    chosen, model, _ = restore_tree(checkpoints, abstract, step, part, run, stacks(cfg))
    parity = compare(model, program.rules(chosen), folder, seq_len=_SEQ_LEN.value, dtype=dtype)
  print("\n".join(parity.lines()))
  logits, kl = MOST[dtype]
  same = parity.logits <= logits and parity.kl <= kl
  print(f"{'the same model' if same else 'NOT the same model'} in {dtype}")
  return same


def _command(
  does: Callable[[Path, paths.Path], bool], own: flags.FlagValues, about: str
) -> cli.Command:
  def main(argv: list[str]) -> int:
    del argv
    name = cli.require(own["folder"].value, "folder", "Llama-3.2-1B")
    if does is _export and hub.is_name(name):
      raise ValueError(f"--folder={name}: an export writes a local folder. hf upload sends it.")
    folder = Path(hub.local(name)).expanduser()
    target = paths.parse(cli.require(own["workdir"].value, "workdir", "runs/imported"))
    began = time.perf_counter()
    good = does(folder, target)
    logging.info("%.1f s", time.perf_counter() - began)
    return exits.DONE if good else exits.FAULT

  return cli.Command(main, own, about)


COMMANDS = {
  "import": _command(_import, _FOR_IMPORT, IMPORT),
  "export": _command(_export, _FOR_EXPORT, EXPORT),
  "verify": _command(_verify, _FOR_VERIFY, VERIFY),
  "train": TRAIN,
}
if __name__ == "__main__":
  cli.main("bridge", COMMANDS)
