"""How near a model of ours is to that of `transformers` with the same weights.

Letters: B batch, T seq, P kept positions, V vocab.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.bridge.families import own
from ats_jax.bridge.folder import CONFIG, read_json
from ats_jax.config.schema import Config
from ats_jax.model.decoder import Decoder
from ats_jax.model.forward_pass import Pass
from ats_jax.pytorch import remote_code
from ats_jax.sharding.apply import num_shards, reshard

ROWS = 2  # of random tokens that are compared
GREEDY_TOKENS = 64  # that are continued greedily
POSITIONS = 512  # whose logits are kept, of all rows together
SHORTEST, LONGEST = 128, 4096 + GREEDY_TOKENS  # rows whose length nobody gave
# The dtype that tells how large the rounding errors of another one are.
WIDER = {"float32": "float64", "bfloat16": "float32"}
TIMES_ROUNDING = 5.0  # the errors of two right programs differ by less
LEAST_ROUNDING = 16 * float(np.finfo(np.float32).eps)  # of the largest logit, where theirs is less


@dataclasses.dataclass(frozen=True)
class Reference:
  """What the model of `transformers` computes of some random rows.

  Attributes:
    tokens_BT: the rows.
    positions_P: those whose logits are kept.
    logits_BPV: in the wider dtype, rounded to float32.
    rounding: largest difference of the logits in `dtype` from these.
    greedy_BT: the likeliest tokens behind the beginning of each row, in `dtype`.
    dtype: the one that is compared.
  """

  tokens_BT: np.ndarray
  positions_P: np.ndarray
  logits_BPV: np.ndarray
  rounding: float
  greedy_BT: np.ndarray
  dtype: str

  @property
  def bound(self) -> float:
    """How far the logits of the same model may be away."""
    scale = float(np.max(np.abs(self.logits_BPV)))
    return max(TIMES_ROUNDING * self.rounding, LEAST_ROUNDING * scale)

  def error(self, ours_BPV: np.ndarray) -> float:
    """How far logits of ours are away at most; not a number if one of them is none."""
    rows = zip(self.logits_BPV, ours_BPV, strict=True)  # one at a time: all are large
    return float(np.max([np.max(np.abs(theirs - ours)) for theirs, ours in rows]))


@dataclasses.dataclass(frozen=True)
class Parity:
  """Differences from a reference.

  Attributes:
    error: largest absolute difference of logits.
    bound: the largest error of the same model.
    kl: largest Kullback-Leibler divergence of ours from theirs, over all tokens, in nats.
    std: of their logits.
    greedy: how many of the likeliest tokens, each put behind the ones before, are equal.
    asked: number of tokens that were compared.
    dtype: in which both compute.
    shape: number of rows, tokens of a row, and positions of a row whose logits are compared.
  """

  error: float
  bound: float
  kl: float
  std: float
  greedy: int
  asked: int
  dtype: str
  shape: tuple[int, int, int]

  @property
  def same(self) -> bool:
    """Whether the two are the same model; False if a logit is no number."""
    return self.error <= self.bound

  def lines(self) -> list[str]:
    """The report."""
    rows, length, kept = self.shape
    return [
      f"compared: {kept:,} positions in each of {rows} rows of {length:,} random tokens",
      f"logits: differ by {self.error:.3g} at most, bound {self.bound:.3g}; theirs have a standard "
      f"deviation of {self.std:.3g}",
      f"KL divergence: {self.kl:.3g} nats at most",
      f"greedy tokens: {self.greedy} of {self.asked} equal",
      f"{'the same model' if self.same else 'NOT the same model'} in {self.dtype}",
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
  """Logits of whole rows, or of some positions, float32 [batch, positions, vocab]."""
  kept_P = np.arange(tokens_BT.shape[1]) if positions_P is None else positions_P
  rows, kept = jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(kept_P, jnp.int32)
  return np.asarray(_logits(model, rows, kept, rules=rules))


@functools.partial(jax.jit, static_argnames="rules")
def _logits(model: Decoder, tokens_BT: jax.Array, kept_P: jax.Array, *, rules: Pass) -> jax.Array:
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  x_BTD, _ = model(
    tokens_BT, positions_BT=positions_BT, segment_ids_BT=jnp.ones_like(tokens_BT), rules=rules
  )
  x_BPD = jnp.take(reshard(x_BTD, None, None, None), kept_P, axis=1)
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


def turning_points(cfg: Config, folder: Path) -> dict[str, int]:
  """Positions behind which a model computes otherwise, by the name of the setting or field.

  They are those of our settings and of the config that `transformers` makes of a folder: where one
  of the two lacks a window, the other one has it.

  Args:
    cfg: our resolved config.
    folder: a Hugging Face folder.

  Raises:
    ValueError: as `reference`.
  """
  theirs = _their_config(folder).get_text_config()
  points = {
    "model.window": cfg.model.window,
    "model.rope_scaling.original_len": getattr(cfg.model.rope_scaling, "original_len", 0),
  }
  for name in ("sliding_window", "attention_chunk_size"):
    points[name] = getattr(theirs, name, None)
  rope = getattr(theirs, "rope_parameters", None) or {}
  of_layers = [part for part in rope.values() if isinstance(part, dict)]  # by kind, or of all
  for part in of_layers or [rope]:
    if part.get("rope_type", "default") not in ("default", "linear"):
      length = part.get("original_max_position_embeddings") or theirs.max_position_embeddings
      name = "original_max_position_embeddings"
      points[name] = max(length, points.get(name) or 0)
  return {name: point for name, point in points.items() if point}


def row_length(points: Mapping[str, int]) -> int:
  """The length of rows that go past all turning points, if `LONGEST` allows it."""
  needed = max(points.values(), default=0) + GREEDY_TOKENS
  return min(max(needed, SHORTEST), LONGEST)


def not_reached(points: Mapping[str, int], seq_len: int) -> list[str]:
  """A line for each turning point that rows of a length do not go past."""
  return [
    f"NOT compared: {name}={point:,} is past the end of rows of {seq_len:,} tokens. To compare it "
    f"as well: --seq_len={point + GREEDY_TOKENS}"
    for name, point in points.items()
    if point >= seq_len
  ]


def reference(
  folder: Path, *, seq_len: int, dtype: str = "float32", rows: int = ROWS, seed: int = 0
) -> Reference:
  """What the model that `transformers` makes of a folder computes, on the CPU.

  It is loaded twice, one after the other: in `dtype` and in the next wider one.

  Args:
    folder: a Hugging Face folder.
    seq_len: tokens of a random row.
    dtype: a key of `WIDER`.
    rows: number of rows; each device of ours needs one.
    seed: seed of the rows.

  Raises:
    ValueError: if torch, transformers or what that needs for the folder is not installed, or the
      folder holds code that is not ours.
  """
  vocab = _their_config(folder).get_text_config().vocab_size
  tokens_BT = np.random.default_rng(seed).integers(0, vocab, (rows, seq_len))
  positions_P = spread(seq_len, POSITIONS // rows)
  theirs = _their_model(folder, WIDER[dtype])
  logits_BPV = np.stack(list(_their_logits(theirs, tokens_BT, positions_P)))
  del theirs  # before the next one is read
  theirs, rounding = _their_model(folder, dtype), []
  for row, logits_PV in enumerate(_their_logits(theirs, tokens_BT, positions_P)):
    rounding.append(np.max(np.abs(logits_PV - logits_BPV[row])))
  greedy_BT = _their_greedy(theirs, _prompt(tokens_BT))
  largest = float(np.max(rounding))
  return Reference(tokens_BT, positions_P, logits_BPV, largest, greedy_BT, dtype)


def compare(model: Decoder, rules: Pass, theirs: Reference) -> Parity:
  """Compare a model of ours.

  Args:
    model: ours, which computes in the dtype of the reference.
    rules: rules of sparse layers in evaluation.
    theirs: the reference.
  """
  ours = our_logits(model, rules, theirs.tokens_BT, theirs.positions_P)
  greedy = our_greedy(model, rules, _prompt(theirs.tokens_BT), GREEDY_TOKENS)
  by_row = zip(theirs.logits_BPV, ours, strict=True)
  return Parity(
    error=theirs.error(ours),
    bound=theirs.bound,
    kl=float(np.max([np.max(divergence(*logits_2PV)) for logits_2PV in by_row])),
    std=float(np.std(theirs.logits_BPV)),
    greedy=int(np.sum(greedy == theirs.greedy_BT)),
    asked=greedy.size,
    dtype=theirs.dtype,
    shape=(*theirs.tokens_BT.shape, len(theirs.positions_P)),
  )


def least_rows() -> int:
  """Rows that are compared in the current mesh, each device of which needs one."""
  return max(ROWS, num_shards("batch"))


def spread(length: int, count: int) -> np.ndarray:
  """At most `count` of `length` positions, in order: the last ones, and some of all the others."""
  if length <= count:
    return np.arange(length)
  last = min(GREEDY_TOKENS, max(1, count // 2))
  others = np.linspace(0, length - last - 1, max(count, 1) - last).astype(int)
  return np.concatenate([others, np.arange(length - last, length)])


def _prompt(tokens_BT: np.ndarray) -> np.ndarray:
  """What greedy tokens continue: nearly all of the rows, so that they are past a window too."""
  return tokens_BT[:, : max(1, tokens_BT.shape[1] - GREEDY_TOKENS)]


def _their_class(folder: Path) -> tuple[Any, Any]:
  """Classes of `transformers` for a folder's config and model, which run no code of the folder.

  `trust_remote_code` would run more of its files than the one that is ours. The module of our own
  family is in this package as well.
  """
  try:
    import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
  except ImportError as e:
    raise _is_missing(e) from e
  fields = read_json(folder / CONFIG)
  if fields.get("model_type") != own.MODEL_TYPE:
    return transformers.AutoConfig, transformers.AutoModelForCausalLM
  file = folder / f"{remote_code.MODULE}.py"
  text = file.read_text(encoding="utf-8") if file.is_file() else ""
  if text != remote_code.source() or fields.get("auto_map") != own.AUTO_MAP:
    raise ValueError(
      f"{folder}: {file.name}, or auto_map of {CONFIG}, is not that of this version of ats_jax, "
      "and the code of a folder is not run here. Export the run again with --family=ats_jax."
    )
  from ats_jax.pytorch import hf

  return hf.AtsJaxConfig, hf.AtsJaxForCausalLM


def _is_missing(e: ImportError) -> ValueError:
  return ValueError(
    f"to compare, torch and transformers must be installed ({e}): pip install 'ats_jax[torch,hf]'."
  )


def _their_config(folder: Path) -> Any:
  return _their_class(folder)[0].from_pretrained(
    folder, local_files_only=True, trust_remote_code=False
  )


def _their_model(folder: Path, dtype: str) -> Any:
  config, of_model = _their_config(folder), _their_class(folder)[1]
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  quantization = getattr(config, "quantization_config", None) or {}
  plain = transformers.Mxfp4Config(dequantize=True)
  try:
    return of_model.from_pretrained(
      folder,
      dtype=getattr(torch, dtype),
      local_files_only=True,
      trust_remote_code=False,
      attn_implementation="eager",
      experts_implementation="eager",  # the others have no float64
      **({"quantization_config": plain} if quantization.get("quant_method") == "mxfp4" else {}),
    ).eval()
  except ImportError as e:
    raise _is_missing(e) from e


def _their_logits(
  theirs: Any, tokens_BT: np.ndarray, positions_P: np.ndarray
) -> Iterator[np.ndarray]:
  """Logits of a row after the other, float32: in eager attention each takes much memory."""
  import torch  # pyright: ignore[reportMissingImports]

  kept_P = torch.from_numpy(positions_P)
  for tokens_T in torch.from_numpy(tokens_BT):
    with torch.no_grad():
      yield theirs(tokens_T[None], logits_to_keep=kept_P, use_cache=False).logits[0].float().numpy()


def _their_greedy(theirs: Any, prompt_BT: np.ndarray) -> np.ndarray:
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  # The folder's own may end texts, or forbid tokens.
  theirs.generation_config = transformers.GenerationConfig(
    max_new_tokens=GREEDY_TOKENS, do_sample=False, pad_token_id=0
  )
  prompt = torch.from_numpy(prompt_BT)
  with torch.no_grad():
    all_tokens = theirs.generate(prompt, attention_mask=torch.ones_like(prompt))
  return all_tokens[:, prompt.shape[1] :].numpy()
