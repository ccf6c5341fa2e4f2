"""Weights from and to Hugging Face and PyTorch."""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from absl import flags, logging

from ats_jax import exits
from ats_jax.bridge import gguf_file, hub, parity, programs
from ats_jax.bridge.convert import ASIDE, COMPANIONS, import_folder
from ats_jax.bridge.export import choose_family, export
from ats_jax.bridge.family import shorten_names
from ats_jax.bridge.folder import imported_fields, is_model_folder
from ats_jax.checkpoint import workdir
from ats_jax.checkpoint.reader import find
from ats_jax.cluster import runtime
from ats_jax.config.build import resolve
from ats_jax.config.names import flatten
from ats_jax.data.tokens.file import load_tokenizer
from ats_jax.inference.base import BASE
from ats_jax.inference.load import as_data, fit_devices, load_run, restored_weights, shapes_of
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.step.program import make_program
from ats_jax.store import paths
from ats_jax.verbs import cli
from ats_jax.verbs.bridge_train import TRAIN

IMPORT = """a workdir whose checkpoint 0 holds the weights of a folder

  ats-jax bridge import --folder=FOLDER --workdir=runs/imported
  ats-jax bridge import --folder=hf://Qwen/Qwen3-0.6B --workdir=runs/imported
  ats-jax bridge import --folder=FOLDER --workdir=runs/imported --tokenizer=bytes

After a kill the same command goes on.
"""
EXPORT = """a folder for transformers, of a run's weights; or its forward pass

  ats-jax bridge export --workdir=runs/debug --folder=FOLDER
  ats-jax bridge export --workdir=runs/debug --folder=FOLDER --step=best --family=llama
  ats-jax bridge export --workdir=runs/debug --folder=FOLDER --format=onnx
  ats-jax bridge export --workdir=runs/tuned --folder=FOLDER --format=peft

After a kill the same command goes on. Adapters are merged into the weights, but for --format=peft.
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
_IGNORED = cli.define_ignored_fields_flag(_FOR_IMPORT)
_KEPT_IN = flags.DEFINE_string(
  "dtype",
  "",
  "Of the weights: float32 or bfloat16; by default as in the files, float16 in float32.",
  flag_values=_FOR_IMPORT,
)
_FAMILY = flags.DEFINE_string(
  "family",
  "",
  "The model_type; by default that of the import, or the first that fits.",
  flag_values=_FOR_EXPORT,
)
_WRITTEN_IN = flags.DEFINE_string(
  "dtype",
  "",
  "Of the weights: float32, bfloat16 or float16; by default that of the import, or as they are.",
  flag_values=_FOR_EXPORT,
)
_FORMAT = flags.DEFINE_string(
  "format",
  "huggingface",
  "Weights with a config.json, gguf for llama.cpp, or adapters alone for peft; or the forward pass "
  "as a program: stablehlo, torch (torch.export) or onnx.",
  flag_values=_FOR_EXPORT,
)
_ROWS = flags.DEFINE_integer(
  "rows", 1, "That a program of stablehlo takes.", lower_bound=1, flag_values=_FOR_EXPORT
)
_LENGTH = flags.DEFINE_integer(
  "seq_len",
  0,
  "Tokens of a row of stablehlo; 0 = data.seq_len.",
  lower_bound=0,
  flag_values=_FOR_EXPORT,
)
_OPSET = flags.DEFINE_integer("opset", 20, "Version of ONNX's operators.", flag_values=_FOR_EXPORT)
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
  "seq_len",
  0,
  f"Tokens of a row; 0 = {parity.GREEDY_TOKENS} more than the model's window and original rotary "
  f"context, {parity.SHORTEST} to {parity.LONGEST}.",
  lower_bound=0,
  flag_values=_FOR_VERIFY,
)


def _one_of(dtype: str, *known: str) -> str:
  if dtype and dtype not in known:
    raise ValueError(f"--dtype={dtype} is unknown. Choose one of: {', '.join(known)}.")
  return dtype


def _import(folder: Path, target: paths.Path) -> bool:
  dtype = _one_of(_KEPT_IN.value, "float32", "bfloat16")
  report = import_folder(
    folder, target, param_dtype=dtype, tokenizer=_TOKENIZER.value, ignored=_IGNORED.value
  )
  print(
    f"{report['family']}: {report['parameters']:,} parameters, {report['bytes'] / 2**30:.2f} GiB "
    f"read; {report['resumed']} arrays were there already"
  )
  if report["aside"]:
    print(
      f"left aside, as no model here has them: {len(report['aside'])} tensors, "
      f"{shorten_names(report['aside'])}; all are named in {target}/{COMPANIONS}/{ASIDE}"
    )
  print(f"step 0 of {target}; train on it with --init_from={target}")
  return True


@contextlib.contextmanager
def _without_adapters(source: paths.Path, near: Path) -> Iterator[tuple[paths.Path, str]]:
  """A workdir without adapters, and the step in it: that of --workdir, or a merged one for a while.

  Args:
    source: the workdir of the run.
    near: what is made of it; a merged workdir is beside that.
  """
  if workdir.load_config(source).finetune.adapter.name == "none":
    yield source, _STEP.value
    return
  from ats_jax.bridge.merge import write_merged  # here: few runs have adapters

  near.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=near.parent, prefix=f"{near.name}.merged.") as between:
    target = paths.parse(Path(between) / "run")
    with load_run(source, _STEP.value) as run:
      write_merged(source, run.program.cfg, run.model, run.step, target)
    yield target, "latest"


def _export_peft(folder: Path, source: paths.Path) -> bool:
  """Write adapters alone."""
  if workdir.load_config(source).finetune.adapter.name == "none":
    raise ValueError(f"--format=peft: {source} has no adapters (finetune.adapter.name=none).")
  from ats_jax.bridge import peft_folder

  with load_run(source, _STEP.value) as run:
    cfg = run.program.cfg
    theirs = imported_fields(source / COMPANIONS)
    family = choose_family(cfg, _FAMILY.value, theirs.get("model_type", "")).fitted(flatten(cfg))
    base = run.extra.get(BASE, {}).get("folder", "")
    if not (base and is_model_folder(paths.parse(base))):
      base = theirs.get("_name_or_path", "")
    number = peft_folder.write(folder, cfg, family, run.model, base=base)
  print(f"step {run.step} as {family.name}: {number} tensors of adapters")
  return True


def _export_gguf(folder: Path, source: paths.Path) -> bool:
  """Write model and tokenizer for llama.cpp."""
  if folder.exists():
    raise ValueError(f"{folder} exists. Remove it or choose another folder.")
  unfinished = folder.with_name(folder.name + ".unfinished")
  unfinished.mkdir(parents=True, exist_ok=True)
  dtype = _one_of(_WRITTEN_IN.value, "float32", "float16") or "float16"
  with tempfile.TemporaryDirectory(dir=unfinished) as between:
    plain = Path(between) / "plain"
    with _without_adapters(source, folder) as (run, step):
      report = export(run, plain, step=step, family=_FAMILY.value, dtype=dtype)
    number, lacks = gguf_file.write(plain, unfinished / "model.gguf")
  unfinished.rename(folder)
  size = (folder / "model.gguf").stat().st_size / 1e6
  print(f"step {report['step']} as {report['family']}: model.gguf, {number} tensors, {size:.1f} MB")
  if lacks:
    print(f"no tokenizer is in it, so llama.cpp needs token ids: {lacks}")
  return True


def _export_program(folder: Path, source: paths.Path) -> bool:
  """Write the forward pass as a program."""
  if folder.exists():
    raise ValueError(f"{folder} exists. Remove it or choose another folder.")
  if _WRITTEN_IN.value or _FAMILY.value:
    raise ValueError(f"--format={_FORMAT.value} computes as the run does: no --dtype, --family.")
  if jax.device_count() > 1:
    raise ValueError(
      f"--format={_FORMAT.value}: a program is of one device, and here are {jax.device_count()}. "
      "CUDA_VISIBLE_DEVICES=0 shows one, JAX_PLATFORMS=cpu the CPU."
    )
  with load_run(source, _STEP.value) as run:
    cfg, unfinished = run.program.cfg, folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
      files = programs.FORMATS[_FORMAT.value](
        cfg, run.model, run.program.rules(run.step), unfinished,
        rows=_ROWS.value, seq_len=_LENGTH.value or cfg.data.seq_len, opset=_OPSET.value,
      )  # fmt: skip
    except ModuleNotFoundError as e:
      needs = "'ats_jax[torch,onnx]'"
      raise ValueError(f"--format={_FORMAT.value} needs {e.name}: pip install {needs}.") from e
    unfinished.rename(folder)
  sizes = (f"{name} {(folder / name).stat().st_size / 1e6:.1f} MB" for name in files)
  print(f"step {run.step}: {', '.join(sizes)}")
  return True


def _export(folder: Path, source: paths.Path) -> bool:
  known = ("huggingface", "gguf", "peft", *programs.FORMATS)
  if _FORMAT.value not in known:
    raise ValueError(f"--format={_FORMAT.value} is unknown. Choose one of: {', '.join(known)}.")
  if _FORMAT.value == "gguf":
    return _export_gguf(folder, source)
  if _FORMAT.value == "peft":
    return _export_peft(folder, source)
  if _FORMAT.value != "huggingface":
    return _export_program(folder, source)
  if folder.exists():
    raise ValueError(f"{folder} exists. Remove it or choose another folder.")
  with _without_adapters(source, folder) as (run, step):
    report = export(
      run,
      folder,
      step=step,
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
  dtype, asked = _one_of(_COMPUTED_IN.value, *parity.WIDER), _STEP_TO_VERIFY.value
  cfg = as_data(workdir.load_config(source))
  cfg = dataclasses.replace(
    cfg, precision=dataclasses.replace(cfg.precision, compute_dtype=dtype, fp8=False)
  )
  runtime.configure(cfg)
  words = load_tokenizer(source / workdir.TOKENIZER)
  cfg = fit_devices(resolve(cfg, words.vocab_size), jax.device_count())
  with on_mesh(cfg, make_mesh(cfg)):
    program = make_program(cfg)
    step = int(asked) if asked.isdecimal() else asked
    find(source / workdir.CHECKPOINTS, step)  # a wrong step is said before minutes of work
    points = parity.turning_points(cfg, folder)
    seq_len = _SEQ_LEN.value or parity.row_length(points)
    # Before ours is read, so that there is room for theirs.
    theirs = parity.reference(folder, seq_len=seq_len, dtype=dtype, rows=parity.least_rows())
    chosen, model, _ = restored_weights(source, program, words, step, shapes_of(program))
    found = parity.compare(model, program.rules(chosen), theirs)
  print("\n".join([*parity.not_reached(points, seq_len), *found.lines()]))
  return found.same


def _command(
  does: Callable[[Path, paths.Path], bool], own: flags.FlagValues, about: str
) -> cli.Command:
  def main(argv: list[str]) -> int:
    del argv
    name = cli.require(own["folder"].value, "folder", "Llama-3.2-1B")
    if does is _export and hub.is_name(name):
      raise ValueError(f"--folder={name}: an export writes a local folder. hf upload sends it.")
    folder = Path(hub.local_folder(name)).expanduser()
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
