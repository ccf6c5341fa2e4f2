"""The smallest run that learns something: about 1M parameters on this machine's own Python sources.

Goal: a validation loss below a bigram model's within 4 minutes on 2 CPU cores, nothing downloaded.
Command: python -m ats_jax.train --config=configs/debug.py --workdir=runs/debug
"""

from ats_jax.config import base_config


def get_config(variant: str = ""):
  if variant:
    raise ValueError(f"configs/debug.py: unknown variant {variant!r}. It has none: leave it out.")
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
  config.optimizer.warmup_steps = 50
  config.precision.compute_dtype = "float32"  # CPUs have no fast bfloat16
  config.checkpoint.every_steps = 100
  config.eval.every_steps = 200
  config.eval.bigram_baseline = True
  config.sample.prompt = "def "
  return config
