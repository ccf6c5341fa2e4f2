r"""Dense, mixture of experts, mixture of depths and both, at equal active FLOPs and equal tokens.

Prints a table for docs/guides/experts.md: losses, parameters, FLOPs and the time of a step.
Command: python -m lab.sparse [--size=tiny] [--seeds=3] [--variants=dense,moe] [--paths=...]
"""

import statistics

import jax
from absl import app, flags
from ml_collections import ConfigDict

from ats_jax.cluster import runtime
from ats_jax.config import base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.model.count import Counts
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import make_program
from lab.runs import Changes, Result, markdown, run

# Experts half as wide as the feed-forward that they replace: weights that sum to 2 make up for it.
EXPERTS = {"moe.num_experts": 8, "moe.top_k": 2, "moe.route_scale": 2.0}
DEPTHS = {"mod.routing": "learned", "mod.every": 2, "mod.capacity": 0.125}
# Layers that skip 7 of 8 tokens leave FLOPs for more layers: twice the dense model's, less one or
# two. The width of the feed-forward takes up the rest.
VARIANTS: dict[str, Changes] = {
  "dense": {},
  "moe": EXPERTS,
  "mod": DEPTHS,
  "mod half": DEPTHS | {"mod.capacity": 0.5},
  "hybrid": EXPERTS | DEPTHS,
  "null experts": EXPERTS | {"moe.null_experts": 8},
}
LAYERS = {
  "tiny": {0.125: 7, 0.5: 5},
  "100m": {0.125: 21, 0.5: 16},
}
_SIZE = flags.DEFINE_enum("size", "tiny", list(LAYERS), "Of the dense model.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each variant.", lower_bound=1)
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), "Which to train.")
_PATHS = flags.DEFINE_string("paths", "", "Text or tokens to train on (data.paths).")
_VALIDATION = flags.DEFINE_string("validation_paths", "", "The same for validation.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bpe", "data.tokenizer.")
_STEPS = flags.DEFINE_integer("steps", 0, "Updates of a run; 0 = the size's own.", lower_bound=0)
_RATE = flags.DEFINE_float("learning_rate", 0.0, "Its peak; 0 = the size's own.", lower_bound=0.0)


def dense_config(size: str) -> ConfigDict:
  """The dense model and how it is trained."""
  config = base_config()
  config.data.paths, config.data.validation_paths = _PATHS.value, _VALIDATION.value
  config.data.tokenizer = _TOKENIZER.value
  if size == "tiny":
    shape = dict(num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, d_ff=384)
    config.num_steps, config.data.seq_len, config.data.batch_size = 400, 128, 16
    config.data.bpe_vocab_size, config.data.validation_fraction = 1024, 0.02
    config.optimizer.learning_rate = 3e-3
    config.precision.compute_dtype = "float32"
  else:
    shape = dict(num_layers=12, d_model=768, num_heads=12, num_kv_heads=4, d_ff=2048)
    config.num_steps, config.data.seq_len, config.data.batch_size = 600, 2048, 32
    config.data.bpe_vocab_size, config.data.max_segments = 16384, 16
    config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_fraction = 0.1
  config.model.update(shape)
  config.num_steps = _STEPS.value or config.num_steps
  config.optimizer.learning_rate = _RATE.value or config.optimizer.learning_rate
  return config


def counts(config: ConfigDict) -> Counts:
  """Parameters and FLOPs of a config."""
  cfg = from_config_dict(config)
  cfg = resolve(cfg, cfg.data.bpe_vocab_size)
  with jax.set_mesh(make_mesh(cfg)):
    return make_program(cfg).counts


def variant(size: str, name: str) -> ConfigDict:
  """The config of a variant, its feed-forward as wide as the FLOPs of the dense model allow."""
  config = dense_config(size)
  target = counts(config).flops_causal
  config.update_from_flattened_dict(VARIANTS[name])
  if config.mod.routing != "none":
    config.model.num_layers = LAYERS[size][config.mod.capacity]
  unit = 8 if size == "tiny" else 64
  field = (config.moe, "d_ff") if config.moe.num_experts else (config.model, "d_ff")

  def excess(width: int) -> float:
    setattr(*field, width)
    return counts(config).flops_causal - target

  low, high = excess(unit), excess(2 * unit)
  width = unit * max(1, round(1 - low / (high - low)))
  setattr(*field, width)
  return config


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  size, rows, base = _SIZE.value, [], None
  runtime.configure(from_config_dict(dense_config(size)))
  for name in _VARIANTS.value:
    config = variant(size, name)
    results: list[Result] = []
    for seed in range(_SEEDS.value):
      results.append(run(config, {"seed": seed}))
      print(name, seed, results[-1].scores, results[-1].step_secs, flush=True)
    base = base or results[0]
    losses = [r.scores["eval/loss"] for r in results]
    found, secs = results[0].counts, statistics.median(r.step_secs for r in results)
    width = config.moe.d_ff if config.moe.num_experts else config.model.d_ff
    rows.append(
      [
        name,
        f"{config.model.num_layers} x {width}",
        f"{found.parameters / 1e6:.2f}M",
        f"{found.flops_causal / base.counts.flops_causal:.3f}",
        " ".join(f"{loss:.3f}" for loss in losses),
        f"{statistics.mean(losses):.3f}",
        f"{secs / base.step_secs:.2f}",
      ]
    )
    print(rows[-1], flush=True)
  header = ["", "layers x width", "parameters", "FLOPs", "validation losses", "mean", "step time"]
  print(markdown(header, rows))


if __name__ == "__main__":
  app.run(main)
