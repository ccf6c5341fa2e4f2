"""How near a model of ours is to that of `transformers` with the same weights.

Letters: B batch, T seq, V vocab.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.sharding.apply import num_shards, reshard

ROWS = 2  # of random tokens that are compared
GREEDY_TOKENS = 64  # that are continued greedily


@dataclasses.dataclass(frozen=True)
class Parity:
  """Differences over some random rows.

  Attributes:
    logits: largest absolute difference.
    kl: largest Kullback-Leibler divergence of ours from theirs, over all tokens, in nats.
    std: of their logits: the smaller, the less the two above say.
    greedy: how many of the likeliest tokens, each put behind the ones before, are equal.
    asked: number of tokens that were compared.
  """

  logits: float
  kl: float
  std: float
  greedy: int
  asked: int

  def lines(self) -> list[str]:
    """The report."""
    return [
      f"logits: differ by {self.logits:.3g} at most; theirs have a standard deviation of "
      f"{self.std:.3g}",
      f"KL divergence: {self.kl:.3g} nats at most",
      f"greedy tokens: {self.greedy} of {self.asked} equal",
    ]


def divergence(theirs_BTV: np.ndarray, ours_BTV: np.ndarray) -> np.ndarray:
  """KL divergence of two distributions by logits, a token; in float64."""
  theirs, ours = (_log_softmax(np.asarray(a, np.float64)) for a in (theirs_BTV, ours_BTV))
  return np.sum(np.exp(theirs) * (theirs - ours), axis=-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def our_logits(model: Decoder, rules: Pass, tokens_BT: np.ndarray) -> np.ndarray:
  """Logits of whole rows, float32 [batch, seq, vocab]."""
  return np.asarray(_logits(model, jnp.asarray(tokens_BT, jnp.int32), rules=rules))


@functools.partial(jax.jit, static_argnames="rules")
def _logits(model: Decoder, tokens_BT: jax.Array, *, rules: Pass) -> jax.Array:
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  x_BTD, _ = model(
    tokens_BT, positions_BT=positions_BT, segment_ids_BT=jnp.ones_like(tokens_BT), rules=rules
  )
  return reshard(model.logits(x_BTD), None, None, None)


def our_greedy(model: Decoder, rules: Pass, prompt_BT: np.ndarray, count: int) -> np.ndarray:
  """The likeliest next token, `count` times, with a cache; int32 [batch, count]."""
  batch, length = prompt_BT.shape
  cache = model.empty_cache(batch, length + count, rules, model.num.compute_dtype)
  at = np.broadcast_to(np.arange(length, dtype=np.int32), prompt_BT.shape)
  tokens_BT, new_tokens = jnp.asarray(prompt_BT, jnp.int32), []
  for number in range(count):
    token_B, cache = _next(model, tokens_BT, jnp.asarray(at), cache, rules=rules)
    new_tokens.append(np.asarray(token_B))
    tokens_BT, at = token_B[:, None], np.full((batch, 1), length + number, np.int32)
  return np.stack(new_tokens, axis=1)


@functools.partial(jax.jit, static_argnames="rules", donate_argnames="cache")
def _next(
  model: Decoder, tokens_BT: jax.Array, index_BT: jax.Array, cache: Any, *, rules: Pass
) -> tuple[jax.Array, Any]:
  tokens_BT, index_BT = (reshard(a, "batch", "seq") for a in (tokens_BT, index_BT))
  valid_BT = jnp.ones_like(tokens_BT) > 0
  x_BTD, cache = model.extend(tokens_BT, index_BT, valid_BT, cache, rules)
  logits_BV = reshard(model.logits(x_BTD[:, -1:]), None, None, None)[:, 0]
  return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), cache


def compare(
  model: Decoder, rules: Pass, folder: Path, *, seq_len: int, dtype: str = "float32", seed: int = 0
) -> Parity:
  """Compare with the model that `transformers` makes of a folder, on the CPU.

  Args:
    model: ours.
    rules: rules of sparse layers in evaluation.
    folder: a Hugging Face folder.
    seq_len: positions in a random row.
    dtype: in which theirs computes.
    seed: seed of the random rows.

  Raises:
    ValueError: if torch, transformers or what that needs for the folder is not installed.
  """
  try:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    quantization = getattr(config, "quantization_config", None) or {}
    plain = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
      folder,
      dtype=getattr(torch, dtype),
      local_files_only=True,
      attn_implementation="eager",
      **({"quantization_config": plain} if quantization.get("quant_method") == "mxfp4" else {}),
    ).eval()
  except ImportError as e:
    raise ValueError(
      f"to compare, torch and transformers must be installed ({e}): "
      "pip install 'ats_jax[torch,hf]'."
    ) from e
  vocab = theirs.config.get_text_config().vocab_size
  rows = max(ROWS, num_shards("batch"))  # each device needs one
  tokens_BT = np.random.default_rng(seed).integers(0, vocab, (rows, seq_len))
  prompt = torch.from_numpy(tokens_BT[:, : max(1, seq_len // 2)])
  with torch.no_grad():
    their_logits = theirs(torch.from_numpy(tokens_BT)).logits.float().numpy()
    generated = theirs.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      max_new_tokens=GREEDY_TOKENS,
      min_new_tokens=GREEDY_TOKENS,
      do_sample=False,
    )
  their_greedy = generated[:, prompt.shape[1] :].numpy()
  logits = our_logits(model, rules, tokens_BT)
  greedy = our_greedy(model, rules, prompt.numpy(), GREEDY_TOKENS)
  return Parity(
    logits=float(np.max(np.abs(logits - their_logits))),
    kl=float(np.max(divergence(their_logits, logits))),
    std=float(np.std(their_logits)),
    greedy=int(np.sum(greedy == their_greedy)),
    asked=greedy.size,
  )
