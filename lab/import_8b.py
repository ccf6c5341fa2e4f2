r"""An import of a model of 8B parameters: how long it takes, and how near it is to transformers'.

Makes a folder as Llama 3.1 8B is published (bfloat16, files of 5 GB at most) with random weights
under which logits have a deviation of 1. Times `ats-jax bridge import` and what `--init_from` does.
Then the logits of random rows: ours in bfloat16 beside those of transformers in bfloat16 (its
`eager` and its `sdpa` attention) and in float32. How far the last three are from each other says
what bfloat16 alone does. Needs the extras `torch` and `hf`.
Command: python -m lab.import_8b [--layers=32 --width=4096 --vocab=128256 --rows=2]

With `--memory` instead the host memory of `ats-jax train --init_from` on a CPU, to its first step,
beside that of the state: GB of resident pages that are the process's own (RssAnon) and those of
files (RssFile), sampled each 2 ms, and the kernel's peak of both (VmHWM).
Command: python -m lab.import_8b --memory --layers=16 --width=2048 --vocab=32768
"""

import dataclasses
import multiprocessing
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import app, flags

from lab.child import Child

_LAYERS = flags.DEFINE_integer("layers", 32, "")
_WIDTH = flags.DEFINE_integer("width", 4096, "A multiple of 128.")
_VOCAB = flags.DEFINE_integer("vocab", 128256, "")
_ROWS = flags.DEFINE_integer("rows", 2, "")
_TOKENS = flags.DEFINE_integer("tokens", 512, "Of a row.")
_SHARP = flags.DEFINE_float("sharp", 1.0, "Factor on the spread of queries and keys.")
_MEMORY = flags.DEFINE_bool("memory", False, "Measure the host memory of --init_from alone.")
_IN = flags.DEFINE_string("in", "", "Folder for what is written; by default a temporary one.")


def write(folder: Path, layers: int, width: int, vocab: int, sharp: float) -> None:
  """A folder with random weights."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  config = transformers.LlamaConfig(
    vocab_size=vocab,
    hidden_size=width,
    intermediate_size=width * 7 // 2,
    num_hidden_layers=layers,
    num_attention_heads=width // 128,
    num_key_value_heads=max(1, width // 512),
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={
      "rope_type": "llama3",
      "rope_theta": 500000.0,
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    },
  )
  torch.manual_seed(0)
  torch.set_default_dtype(torch.bfloat16)
  with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = transformers.LlamaForCausalLM(config)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if weight.ndim == 1:
        torch.nn.init.normal_(weight, 1.0, 0.3)
        continue
      spread = weight.shape[-1] ** -0.5
      if "q_proj" in name or "k_proj" in name:
        spread *= sharp
      torch.nn.init.normal_(weight, 0.0, 0.5 if "embed" in name else spread)
  model.save_pretrained(folder, max_shard_size="5GB")


def theirs(folder: Path, tokens: np.ndarray, out: Path) -> None:
  """Logits of transformers, three ways."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  device = "cuda" if torch.cuda.is_available() else "cpu"
  ways = {
    "eager": ("eager", torch.bfloat16),
    "sdpa": ("sdpa", torch.bfloat16),
    "float32": ("eager", torch.float32),
  }
  for name, (attention, dtype) in ways.items():
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    model = model.to(device).eval()
    rows = torch.from_numpy(tokens).to(device)
    with torch.no_grad():
      if name == "float32":
        weights = model(rows, output_attentions=True).attentions
        late = [w[:, :, 3 * tokens.shape[1] // 4 :] for w in weights]
        entropy = [-(w * (w + 1e-30).log()).sum(-1).mean().item() for w in late]
        most = np.log(tokens.shape[1])
        print(f"attention has an entropy of {np.mean(entropy):.2f} nats of {most:.2f}")
        del weights, late
      np.save(out / f"{name}.npy", model(rows).logits.float().cpu().numpy())
    del model
    if device == "cuda":
      torch.cuda.empty_cache()


def into_workdir(folder: Path, workdir: Path) -> None:
  """What `ats-jax bridge import` does."""
  import jax

  jax.config.update("jax_platforms", "cpu")
  from ats_jax.bridge.convert import import_folder
  from ats_jax.store import paths

  began = time.perf_counter()
  report = import_folder(folder, paths.parse(workdir), tokenizer="bytes")
  secs = time.perf_counter() - began
  print(
    f"import: {report['parameters']:,} parameters, {report['bytes'] / 1e9:.2f} GB in {secs:.1f} s, "
    f"{report['bytes'] / 1e9 / secs:.2f} GB/s"
  )


def ours(folder: Path, tokens: np.ndarray, out: Path) -> None:
  """Our logits, and the time to fill the device."""
  import jax
  from flax import nnx

  from ats_jax.bridge.convert import config_of, load_model
  from ats_jax.bridge.folder import open_model_folder
  from ats_jax.bridge.parity import our_logits
  from ats_jax.checkpoint import abstract_like
  from ats_jax.config.build import resolve
  from ats_jax.model.decoder import Decoder
  from ats_jax.model.forward_pass import rules_at
  from ats_jax.model.numerics import numerics
  from ats_jax.sharding.mesh import make_mesh

  source = open_model_folder(folder)
  cfg = resolve(config_of(source, tokenizer="bytes"), 0)
  with jax.set_mesh(make_mesh(cfg)):
    build = lambda key: Decoder(cfg, numerics(cfg), nnx.Rngs(params=key))
    shapes = jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(0)))
    began = time.perf_counter()
    model = load_model(source, cfg, abstract_like(shapes, jax.sharding.get_mesh()))
    jax.block_until_ready(model)
    print(f"into the device: {time.perf_counter() - began:.1f} s")
    logits = [our_logits(model, rules_at(cfg, 0, training=False), row[None]) for row in tokens]
  np.save(out / "ours.npy", np.concatenate(logits))


def compare(out: Path) -> None:
  """The table."""
  from ats_jax.bridge.parity import divergence

  found = {name: np.load(out / f"{name}.npy") for name in ("ours", "eager", "sdpa", "float32")}
  print(f"standard deviation of the logits: {found['float32'].std():.2f}")
  for one, other in (
    ("eager", "ours"),
    ("sdpa", "ours"),
    ("eager", "sdpa"),
    ("float32", "ours"),
    ("float32", "eager"),
    ("float32", "sdpa"),
  ):
    kl = np.concatenate([divergence(a, b) for a, b in zip(found[one], found[other], strict=True)])
    same = np.mean(found[one].argmax(-1) == found[other].argmax(-1))
    print(
      f"{other:6s} from {one:8s} KL mean {kl.mean():.2e}, most {kl.max():.2e}; "
      f"largest difference {np.abs(found[one] - found[other]).max():.3f}; "
      f"likeliest token equal {100 * same:.1f} %"
    )


class Resident(NamedTuple):
  """GB of a process at a time (`time.time`)."""

  at: float
  peak: float
  own: float
  files: float


def resident(pid: int) -> Resident:
  """What /proc says of a process."""
  text = Path(f"/proc/{pid}/status").read_text()
  kib = [re.search(rf"{name}:\s+(\d+)", text) for name in ("VmHWM", "RssAnon", "RssFile")]
  return Resident(time.time(), *(int(m[1]) * 1024 / 1e9 if m else 0.0 for m in kib))


def memory(folder: Path, run: Path) -> None:
  """The table of `--memory`."""
  (folder.parent / "text.txt").write_text("the cat sat on the mat. " * 4000)
  config = folder.parent / "config.py"
  command = [sys.executable, "-m", "ats_jax"]
  made = Child(
    [*command, "config", "import", f"{folder}/config.json", f"--to={config}"],
    {"JAX_PLATFORMS": "cpu"},
  )
  if made.ended(time.time() + 120):
    raise SystemExit(made.text())
  settings = {
    "data.paths": folder.parent / "text.txt", "data.tokenizer": "bytes", "data.batch_size": 1,
    "data.seq_len": 64, "data.validation_fraction": 0.0, "data.cache_dir": run / "cache",
    "step.remat": "full", "num_steps": 1, "optimizer.warmup_steps": 0, "sample.max_tokens": 0,
    "log.progress": False, "log.writers": "jsonl", "compilation_cache": "off",
  }  # fmt: skip
  words = [f"--config.{name}={value}" for name, value in settings.items()]
  child = Child(
    [*command, "train", f"--config={config}", f"--workdir={run}", f"--init_from={folder}", *words],
    {"JAX_PLATFORMS": "cpu"},
  )
  samples = list[Resident]()
  try:
    while child.runs and not any("first step done" in line for _, line in child.lines):
      samples.append(resident(child.process.pid))
      time.sleep(0.002)
  finally:
    child.end()
  lines = {}
  for name, pattern in (
    ("the folder is opened", "config.json: without a bearing"),
    ("the model is filled", "the weights are those of"),
    ("the state is ready", "parameters:$"),
    ("the first step is done", "first step done"),
  ):
    lines[name] = next((at for at, line in child.lines if re.search(pattern, line)), None)
    if lines[name] is None:
      raise SystemExit(f"no line like {pattern!r}:\n{child.text()}")
  largest, state, model, layer = sizes(run)
  bound = 1.1 * (state + layer)
  print(
    f"GB: state {state:.2f}, of it the model {model:.2f}; a layer {layer:.3f}, the largest array "
    f"{largest:.3f}; bound (state, a layer and 10 %) {bound:.2f}"
  )
  print("| until | VmHWM | RssAnon | RssFile | VmHWM over the bound | since the opening |")
  print("|---|--:|--:|--:|--:|--:|")
  opened = 0.0
  for name, at in lines.items():
    until = [s for s in samples if s.at <= at]
    peak, own, files = (max(s[i] for s in until) for i in (1, 2, 3))
    opened = opened or peak
    print(
      f"| {name} | {peak:.2f} | {own:.2f} | {files:.2f} | {peak / bound:.3f} "
      f"| {(peak - opened) / bound:.3f} |"
    )


def sizes(run: Path) -> tuple[float, float, float, float]:
  """GB of the largest array, of a run's state, of its model, and of a layer of it."""
  import jax

  from ats_jax.checkpoint import layout, workdir
  from ats_jax.config.build import resolve
  from ats_jax.model.layout import stacks
  from ats_jax.sharding.mesh import make_mesh, on_mesh
  from ats_jax.step.program import make_program
  from ats_jax.store import paths

  jax.config.update("jax_platforms", "cpu")
  cfg = resolve(workdir.load_config(paths.parse(run)), 0)
  with on_mesh(cfg, make_mesh(cfg)):
    state = make_program(cfg).init(abstract=True)
  gb = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e9
  parts = layout.named_arrays(state.model, stacks=stacks(cfg))
  of = {n: np.prod(p.shape) * p.leaf.dtype.itemsize / 1e9 for n, p in parts.items()}
  layer = sum(size for name, size in of.items() if name.startswith("layers/0/"))
  keyless = dataclasses.replace(state, key=None)
  return max(of.values()), gb(keyless), gb(state.model), layer


def main(argv: list[str]) -> None:
  """One process for each part: jax and torch do not share a device's memory."""
  del argv
  with tempfile.TemporaryDirectory(dir=_IN.value or None) as root:
    folder, out = Path(root) / "folder", Path(root)
    tokens = np.random.default_rng(0).integers(0, _VOCAB.value, (_ROWS.value, _TOKENS.value))
    parts = {
      write: (folder, _LAYERS.value, _WIDTH.value, _VOCAB.value, _SHARP.value),
      into_workdir: (folder, out / "run"),
      theirs: (folder, tokens, out),
      ours: (folder, tokens, out),
      compare: (out,),
    }
    if _MEMORY.value:
      parts = {write: parts[write], memory: (folder, out / "run")}
    for part, args in parts.items():
      began = time.perf_counter()
      process = multiprocessing.get_context("spawn").Process(target=part, args=args)
      process.start()
      process.join()
      if process.exitcode:
        raise SystemExit(f"{part.__name__} ended with {process.exitcode}")
      print(f"{part.__name__}: {time.perf_counter() - began:.1f} s in all", flush=True)


if __name__ == "__main__":
  app.run(main)
