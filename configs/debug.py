"""The smallest run that learns something: about 1M parameters on this machine's own Python sources.

Goal: a validation loss below a bigram model's within 4 minutes on 2 CPU cores, nothing downloaded.
Command: python -m ats_jax train --config=configs/debug.py --workdir=runs/debug
Variants: dense (default); moe: 8 experts half as wide, of which a token uses 2; mod: 8 layers, of
which every other one takes an eighth of the tokens; hybrid: both; null: moe and 8 null experts.
"""

from ats_jax.config import base_config

VARIANTS = ("dense", "moe", "mod", "hybrid", "null")


def get_config(variant: str = "dense"):
  if variant not in VARIANTS:
    raise ValueError(
      f"configs/debug.py: unknown variant {variant!r}. Choose one of {', '.join(VARIANTS)}."
    )
  config = base_config()
  config.num_steps = 400
  config.model.num_layers = 4
  config.model.d_model = 128
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.model.d_ff = 384
  config.data.bpe_vocab_size = 1024
  config.data.seq_len = 128
  config.data.batch_size = 16
  config.data.validation_fraction = 0.02
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_fraction = 0.125  # 50 of 400 steps; a shorter run warms up faster
  config.precision.compute_dtype = "float32"  # CPUs have no fast bfloat16
  config.checkpoint.every_steps = 100
  config.eval.every_steps = 200
  config.eval.bigram_baseline = True
  config.sample.prompt = "def "
  if variant in ("moe", "hybrid", "null"):
    config.moe.num_experts = 8
    config.moe.d_ff = 192
    config.moe.route_scale = 2.0  # for experts half as wide as the dense feed-forward
  if variant == "null":
    config.moe.null_experts = 8
  if variant in ("mod", "hybrid"):
    config.model.num_layers = 8
    config.mod.routing = "learned"
  return config
