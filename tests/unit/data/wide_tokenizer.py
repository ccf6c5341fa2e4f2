from ats_jax.data.tokens.tokenizer import ByteTokenizer


class WideTokenizer(ByteTokenizer):
  """Enough ids to give every token of a small corpus one of its own."""

  vocab_size, bos_id, eos_id, pad_id = 200_000, 199_997, 199_998, 199_999
  fingerprint = "wide"
