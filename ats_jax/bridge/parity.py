"""How near a model of ours is to that of `transformers` with the same weights.

Letters: B batch, T seq, V vocab.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.pytorch import remote_code
from ats_jax.sharding.apply import num_shards, reshard

ROWS = 2  # of random tokens that are compared
GREEDY_TOKENS = 64  # that are continued greedily
POSITIONS = 512  # of a row whose logits are compared, at most
# Tokens of a row that is chosen here: attention of `transformers` holds all products of a layer.
SHORTEST, LONGEST = 128, 4_160
BEYOND = 64  # tokens behind the end of a window or of the context that rope was trained with
# Ours may differ by so much of what theirs changes by in the next wider format.
NOISE = 5.0
# At least so many roundings of the largest logit: theirs computes in part in float32 anyway.
ROUNDINGS = 32.0
WIDER = {"float32": "float64", "bfloat16": "float32"}
_LENGTHS = ("sliding_window", "sliding_window_size", "original_max_position_embeddings")


class Reference(NamedTuple):
  """What the model of `transformers` computes of some random rows.

  Attributes:
    tokens_BT: the rows.
    positions_P: those whose logits are kept.
    logits_BPV: float32.
    bound: how far the logits of the same model may be from these.
    greedy: the likeliest tokens behind the beginnings of the rows, [batch, tokens].
  """

  tokens_BT: np.ndarray
  positions_P: np.ndarray
  logits_BPV: np.ndarray
  bound: float
  greedy: np.ndarray


@dataclasses.dataclass(frozen=True)
class Parity:
  """Differences over some random rows.

  Attributes:
    logits: largest absolute difference.
    bound: of that of the same model.
    kl: largest Kullback-Leibler divergence of ours from theirs, over all tokens, in nats.
    std: of their logits: the smaller, the less the two above say.
    greedy: how many of the likeliest tokens, each put behind the ones before, are equal.
    asked: number of tokens that were compared.
  """

  logits: float
  bound: float
  kl: float
  std: float
  greedy: int
  asked: int

  @property
  def is_same(self) -> bool:
    """Whether rounding alone leads to such a difference."""
    return self.logits <= self.bound

  def lines(self) -> list[str]:
    """The report."""
    return [
      f"logits: differ by {self.logits:.3g} at most, where rounding may lead to {self.bound:.3g}; "
      f"theirs have a standard deviation of {self.std:.3g}",
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


def our_logits(
  model: Decoder, rules: Pass, tokens_BT: np.ndarray, positions_P: np.ndarray | None = None
) -> np.ndarray:
  """Logits of rows, float32 [batch, positions, vocab]; of all positions by default."""
  at = np.arange(tokens_BT.shape[1]) if positions_P is None else positions_P
  rows, at = jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(at, jnp.int32)
  return np.asarray(_logits(model, rows, at, rules=rules))


@functools.partial(jax.jit, static_argnames="rules")
def _logits(model: Decoder, tokens_BT: jax.Array, at_P: jax.Array, *, rules: Pass) -> jax.Array:
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  x_BTD, _ = model(
    tokens_BT, positions_BT=positions_BT, segment_ids_BT=jnp.ones_like(tokens_BT), rules=rules
  )
  x_BPD = jnp.take(reshard(x_BTD, "batch", None, None), at_P, axis=1)
  return reshard(model.logits(x_BPD), None, None, None)


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


def row_length(*settings: Any) -> tuple[int, int]:
  """Tokens of a row that passes windows and the context that rope was trained with.

  Args:
    settings: nested fields of a config.json, or settings of ours.

  Returns:
    The length, and the one that would be needed if that is more than `LONGEST`, else 0.
  """
  needed = max((BEYOND + length for one in settings for length in _lengths(one)), default=0)
  return max(SHORTEST, min(needed, LONGEST)), needed if needed > LONGEST else 0


def _lengths(fields: Any) -> Iterator[int]:
  if isinstance(fields, dict):
    for name, value in fields.items():
      if name in _LENGTHS and isinstance(value, int):
        yield value
      yield from _lengths(value)


def reference(folder: Path, *, seq_len: int, dtype: str = "float32", seed: int = 0) -> Reference:
  """Compute with the model that `transformers` makes of a folder, on the CPU.

  It computes twice, in the format and in the next wider one, for what rounding does.

  Args:
    folder: a Hugging Face folder.
    seq_len: positions in a random row.
    dtype: in which it computes, "float32" or "bfloat16".
    seed: seed of the random rows.

  Raises:
    ValueError: if torch, transformers or what that needs for the folder is not installed.
  """
  try:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    trusted = {"local_files_only": True, "trust_remote_code": _is_ours(folder)}
    config = transformers.AutoConfig.from_pretrained(folder, **trusted)
    config._experts_implementation = "eager"  # the others have no float64
    quantization = getattr(config, "quantization_config", None) or {}
    plain = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
      folder,
      config=config,
      dtype=getattr(torch, dtype),
      **trusted,
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
  positions_P = np.unique(np.linspace(0, seq_len - 1, min(seq_len, POSITIONS)).astype(int))
  prompt = torch.from_numpy(tokens_BT[:, : max(1, seq_len - GREEDY_TOKENS)])
  keeps = "logits_to_keep" in inspect.signature(theirs.forward).parameters

  def compute() -> np.ndarray:
    kept = {"logits_to_keep": torch.from_numpy(positions_P)} if keeps else {}
    logits = theirs(torch.from_numpy(tokens_BT), **kept).logits
    return (logits if keeps else logits[:, positions_P]).double().numpy()

  with torch.no_grad():
    greedy = theirs.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      max_new_tokens=GREEDY_TOKENS,
      min_new_tokens=GREEDY_TOKENS,
      do_sample=False,
    )[:, prompt.shape[1] :].numpy()
    logits = compute()
    theirs = theirs.to(getattr(torch, WIDER[dtype]))
    noise = float(np.max(np.abs(compute() - logits)))
  least = ROUNDINGS * float(np.finfo(np.float32).eps) * float(np.max(np.abs(logits)))
  bound = max(NOISE * noise, least)
  return Reference(tokens_BT, positions_P, logits.astype(np.float32), bound, greedy)


def _is_ours(folder: Path) -> bool:
  """Whether the code in a folder is what an export by this version writes, and may run."""
  code = [path for path in folder.iterdir() if path.suffix == ".py"]
  ours = f"{remote_code.MODULE}.py"
  return [path.name for path in code] == [ours] and code[0].read_text() == remote_code.source()


def compare(model: Decoder, rules: Pass, theirs: Reference) -> Parity:
  """Compare our model with that of `transformers`.

  Args:
    model: ours.
    rules: rules of sparse layers in evaluation.
    theirs: what it computes.
  """
  prompt = theirs.tokens_BT[:, : -theirs.greedy.shape[1]]
  prompt = prompt if prompt.shape[1] else theirs.tokens_BT[:, :1]
  logits = our_logits(model, rules, theirs.tokens_BT, theirs.positions_P)
  greedy = our_greedy(model, rules, prompt, theirs.greedy.shape[1])
  return Parity(
    logits=float(np.max(np.abs(logits - theirs.logits_BPV))),
    bound=theirs.bound,
    kl=float(np.max(divergence(theirs.logits_BPV, logits))),
    std=float(np.std(theirs.logits_BPV)),
    greedy=int(np.sum(greedy == theirs.greedy)),
    asked=greedy.size,
  )
