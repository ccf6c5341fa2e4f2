r"""One model for each size of GPU memory, to train from scratch with room to spare.

Goal: a run that is certain to fit, planned and compiled to take at most 90 % of the card.
docs/reference/hardware.md has the memory of each and the planner's estimate of its speed.
Command: python -m ats_jax train --config=configs/card.py:24gb --workdir=runs/card \
  --config.data.paths=TEXT
Variants: 6gb, 8gb, 12gb, 16gb, 24gb, 40gb, 48gb, 80gb, for GPUs of the Ampere generation or newer,
and t4, in float16 with a scaled loss. From 12gb on matrices are stored in bfloat16. The moments of
AdamW are in 8 bits everywhere, layers are recomputed, and gradients are summed over micro-batches.
"""

from typing import NamedTuple

from ats_jax.config import base_config


class Card(NamedTuple):
  """A model that fits.

  Attributes:
    layers: of it.
    d_model: its width; heads are 64 or 128 wide.
    d_ff: width of the feed-forward.
    heads: query heads.
    kv_heads: key and value heads.
    rows: of a micro-batch.
    accum: micro-batches of an update.
    rate: learning rate.
    seq: tokens of a row.
    stored: format of matrices.
    computed: format of the operands of matmuls.
  """

  layers: int
  d_model: int
  d_ff: int
  heads: int
  kv_heads: int
  rows: int
  accum: int
  rate: float
  seq: int = 2048
  stored: str = "bfloat16"
  computed: str = "bfloat16"


CARDS = {
  "6gb": Card(20, 896, 2432, 14, 2, rows=4, accum=16, rate=4e-4, stored="float32"),
  "8gb": Card(24, 1024, 2816, 16, 4, rows=4, accum=16, rate=3e-4, stored="float32"),
  "12gb": Card(24, 1536, 4096, 12, 4, rows=4, accum=32, rate=2.5e-4),
  "16gb": Card(22, 1920, 5120, 15, 5, rows=4, accum=32, rate=2e-4),
  "24gb": Card(28, 2304, 6144, 18, 6, rows=4, accum=32, rate=2e-4),
  "40gb": Card(28, 3072, 8192, 24, 8, rows=4, accum=32, rate=1.6e-4),
  "48gb": Card(32, 3072, 8192, 24, 8, rows=4, accum=32, rate=1.6e-4),
  "80gb": Card(36, 3840, 10_240, 30, 6, rows=2, accum=64, rate=1.2e-4, seq=4096),
  "t4": Card(
    12, 768, 2304, 12, 4, rows=8, accum=8, rate=6e-4, stored="float32", computed="float16"
  ),
}


def get_config(variant: str = "24gb"):
  if variant not in CARDS:
    raise ValueError(
      f"configs/card.py: unknown variant {variant!r}. Choose one of {', '.join(CARDS)}."
    )
  card = CARDS[variant]
  config = base_config()
  config.num_steps = 10_000
  config.model.vocab_size = 32_768
  config.model.num_layers = card.layers
  config.model.d_model = card.d_model
  config.model.d_ff = card.d_ff
  config.model.num_heads = card.heads
  config.model.num_kv_heads = card.kv_heads
  config.model.tie_embeddings = True
  config.data.bpe_vocab_size = config.model.vocab_size
  config.data.seq_len = card.seq
  config.data.batch_size = card.rows * card.accum
  config.data.max_segments = 16
  config.optimizer.name = "adamw8bit"
  config.optimizer.learning_rate = card.rate
  config.optimizer.warmup_fraction = 0.02
  config.precision.param_dtype = card.stored
  config.precision.compute_dtype = card.computed
  config.step.accum_steps = card.accum
  config.step.remat = "full"
  config.step.scan_unroll = 1  # a loop over layers is compiled within a minute, and as planned
  config.step.loss_chunk_tokens = 2048
  config.checkpoint.every_steps = 500
  return config
