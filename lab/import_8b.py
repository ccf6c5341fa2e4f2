r"""An import of a model of 8B parameters: how long it takes, and how near it is to transformers'.

Makes a folder as Llama 3.1 8B is published (bfloat16, files of 5 GB at most) with random weights
under which logits have a deviation of 1. Times `ats-jax bridge import` and what `--init_from` does.
Then the logits of random rows: ours in bfloat16 beside those of transformers in bfloat16 (its
`eager` and its `sdpa` attention) and in float32. How far the last three are from each other says
what bfloat16 alone does. Needs the extras `torch` and `hf`.
Command: python -m lab.import_8b [--layers=32 --width=4096 --vocab=128256 --rows=2]
"""

import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app, flags

_LAYERS = flags.DEFINE_integer("layers", 32, "")
_WIDTH = flags.DEFINE_integer("width", 4096, "A multiple of 128.")
_VOCAB = flags.DEFINE_integer("vocab", 128256, "")
_ROWS = flags.DEFINE_integer("rows", 2, "")
_TOKENS = flags.DEFINE_integer("tokens", 512, "Of a row.")
_SHARP = flags.DEFINE_float("sharp", 1.0, "Factor on the spread of queries and keys.")
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
