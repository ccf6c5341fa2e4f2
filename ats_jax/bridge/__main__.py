"""Weights from and to Hugging Face.

python -m ats_jax bridge import --folder=FOLDER --workdir=runs/imported [--tokenizer=bytes]
python -m ats_jax bridge export --workdir=runs/debug --folder=FOLDER [--step=best] [--family=llama]
python -m ats_jax bridge verify --workdir=runs/imported --folder=FOLDER
"""

import dataclasses
import time
from pathlib import Path

import jax
from absl import flags, logging

from ats_jax import cli, paths, runtime, workdir
from ats_jax.bridge.convert import import_folder
from ats_jax.bridge.export import export
from ats_jax.bridge.parity import compare
from ats_jax.checkpoint import abstract_like, restore_tree
from ats_jax.config.build import resolve
from ats_jax.data.tokenizer_file import load_tokenizer
from ats_jax.inference.load import as_data, fit_devices
from ats_jax.model.layout import stacks
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import make_program

# What counts as the same model: see docs/guides/bridge.md.
MOST = {"float32": (1e-4, 1e-6), "bfloat16": (float("inf"), 1e-3)}

_WORKDIR = cli.define_workdir_flag()
_STEP = cli.define_step_flag()
_FOLDER = flags.DEFINE_string("folder", None, "Folder of Hugging Face's: config.json and weights.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", "", "import: 'bytes' or a tokenizer.json, where the folder has none."
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  "",
  ["", "float32", "bfloat16", "float16"],
  "Of the weights in what is written, or of the computation that is compared; by default as they "
  "are, and float32.",
)
_FAMILY = flags.DEFINE_string(
  "family", "", "export: model_type of the folder; by default the first that fits."
)
_SHARD_GB = flags.DEFINE_float(
  "shard_gb", 5.0, "export: a file holds at most this many GB, or one tensor.", lower_bound=0.0
)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 128, "verify: tokens of a row.", lower_bound=2)


def _import(folder: Path, target: paths.Path) -> bool:
  if _DTYPE.value == "float16":
    raise ValueError("--dtype=float16: weights are kept in float32 or bfloat16.")
  report = import_folder(folder, target, param_dtype=_DTYPE.value, tokenizer=_TOKENIZER.value)
  print(
    f"{report['family']}: {report['parameters']:,} parameters, {report['bytes'] / 2**30:.2f} GiB "
    f"read; {report['resumed']} arrays were there already"
  )
  print(f"step 0 of {target}; train on it with --init_from={target}")
  return True


def _export(folder: Path, source: paths.Path) -> bool:
  report = export(
    source,
    folder,
    step=_STEP.value,
    family=_FAMILY.value,
    dtype=_DTYPE.value,
    shard_bytes=int(_SHARD_GB.value * 1e9),
  )
  print(
    f"step {report['step']} as {report['family']}: {report['parameters']:,} parameters in "
    f"{report['files']} files, of which {report['resumed']} were there already"
  )
  return True


def _verify(folder: Path, source: paths.Path) -> bool:
  dtype = _DTYPE.value or "float32"
  if dtype not in MOST:
    raise ValueError(f"--dtype={dtype}: this program computes in {' or '.join(MOST)}.")
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
    step = int(_STEP.value) if _STEP.value.isdecimal() else _STEP.value
    checkpoints, run = source / workdir.CHECKPOINTS, workdir.load_identity(source)
    chosen, model, _ = restore_tree(checkpoints, abstract, step, part, run, stacks(cfg))
    parity = compare(model, program.rules(chosen), folder, seq_len=_SEQ_LEN.value, dtype=dtype)
  print("\n".join(parity.lines()))
  logits, kl = MOST[dtype]
  same = parity.logits <= logits and parity.kl <= kl
  print(f"{'the same model' if same else 'NOT the same model'} in {dtype}")
  return same


_COMMANDS = {"import": _import, "export": _export, "verify": _verify}


def main(argv: list[str]) -> None:
  """Run a command; exit code 1 if the models differ."""
  folder = Path(cli.require(_FOLDER.value, "folder", "Llama-3.2-1B")).expanduser()
  target = paths.parse(cli.require(_WORKDIR.value, "workdir", "runs/imported"))
  began = time.perf_counter()
  good = _COMMANDS[argv[1]](folder, target)
  logging.info("%s: %.1f s", argv[1], time.perf_counter() - began)
  if not good:
    raise SystemExit(1)


if __name__ == "__main__":
  cli.run(main, commands=tuple(_COMMANDS))
