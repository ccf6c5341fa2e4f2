r"""What fine-tuning on a card of some size can be: adapters, formats, rows and recomputation.

Goal: with the largest model named here, at most 92 % of the card by the planner.
Command: python -m ats_jax finetune --config=finetune:24gb --init_from=hf://OWNER/NAME --data=CHATS
Variants: 8gb, 16gb, 24gb, 48gb, 80gb, 141gb, each with the shape of a published model, which
`plan` shows; `finetune` takes the model of --init_from in its place. Without --config it asks the
planner about the device that it runs on.
"""

from typing import NamedTuple

from ats_jax.config import base_config


class Card(NamedTuple):
  """A training that fits.

  Attributes:
    like: the published model whose shape follows.
    layers: of it.
    d_model: its width.
    d_ff: width of the feed-forward.
    heads: query heads, which are 128 wide.
    kv_heads: key and value heads.
    vocab: size of its vocabulary.
    seq: tokens of a row.
    rows: of a micro-batch.
    accum: micro-batches of an update.
    experts: in each layer, of which a token uses 2; 0 = none.
    tied: whether the head is the embedding.
  """

  like: str
  layers: int
  d_model: int
  d_ff: int
  heads: int
  kv_heads: int
  vocab: int
  seq: int
  rows: int
  accum: int
  experts: int = 0
  tied: bool = False


CARDS = {
  "8gb": Card("Qwen3-1.7B", 28, 2048, 6144, 16, 8, 151_936, seq=4096, rows=1, accum=8, tied=True),
  "16gb": Card("Qwen3-4B", 36, 2560, 9728, 32, 8, 151_936, seq=4096, rows=1, accum=8, tied=True),
  "24gb": Card("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128_256, seq=4096, rows=1, accum=8),
  "48gb": Card("Qwen3-14B", 40, 5120, 17_408, 40, 8, 151_936, seq=4096, rows=1, accum=8),
  "80gb": Card("Qwen3-32B", 64, 5120, 25_600, 64, 8, 151_936, seq=4096, rows=1, accum=8),
  "141gb": Card("Mixtral-8x7B", 32, 4096, 14_336, 32, 8, 32_000, 4096, 1, 8, experts=8),
}


def get_config(variant: str = "24gb"):
  if variant not in CARDS:
    raise ValueError(
      f"configs/finetune.py: unknown variant {variant!r}. Choose one of {', '.join(CARDS)}."
    )
  card = CARDS[variant]
  config = base_config()
  config.model.vocab_size = card.vocab
  config.model.num_layers = card.layers
  config.model.d_model = card.d_model
  config.model.d_ff = card.d_ff
  config.model.num_heads = card.heads
  config.model.num_kv_heads = card.kv_heads
  config.model.head_dim = 128
  config.model.tie_embeddings = card.tied
  if card.experts:
    config.moe.num_experts = card.experts
    config.moe.top_k = 2
  config.finetune.adapter = "lora"
  config.data.seq_len = card.seq
  config.data.batch_size = card.rows * card.accum
  config.precision.param_dtype = "bfloat16"
  config.precision.compute_dtype = "bfloat16"
  config.step.accum_steps = card.accum
  config.step.remat = "full"
  config.step.loss_chunk_tokens = 512
  return config
