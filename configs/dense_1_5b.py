r"""1.5B parameters, dense: one GPU of 80 GB or more.

Goal: the speed of a plain training step with real text, packed documents and checkpoints. Before
the Hopper generation, attention needs Triton (the extra `triton`); without, `ops.strict` refuses.
Command: python -m ats_jax train --config=configs/dense_1_5b.py --workdir=runs/dense_1_5b \
  --config.data.paths=TEXT
Weights are float32, and planned to take 55.8 GiB of a device with all else; with bfloat16 weights
(--config.precision.param_dtype=bfloat16) it is 48.4. Measured speed: docs/reference/performance.md.
"""

from ats_jax.config import base_config


def get_config(variant: str = ""):
  if variant:
    raise ValueError(f"configs/dense_1_5b.py: unknown variant {variant!r}. It has none.")
  config = base_config()
  config.num_steps = 2000
  config.model.vocab_size = 128256  # of the Llama 3 tokenizer; room for a smaller one
  config.model.num_layers = 16
  config.model.d_model = 2048
  config.model.num_heads = 32
  config.model.num_kv_heads = 8
  config.model.d_ff = 8192
  config.model.rope_theta = 500_000.0
  config.data.seq_len = 4096
  config.data.batch_size = 8
  config.data.bpe_vocab_size = config.model.vocab_size
  config.data.max_segments = 16
  config.data.num_workers = 2
  config.optimizer.learning_rate = 3e-4
  config.optimizer.warmup_fraction = 0.05
  config.step.remat = "dots"
  config.checkpoint.every_steps = 500
  config.ops.strict = True
  return config
