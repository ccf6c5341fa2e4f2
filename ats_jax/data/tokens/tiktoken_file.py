"""Rank files of tiktoken -> a tokenizer.json with the same ids for every text.

tiktoken joins the two neighbours that have the lowest rank together. A tokenizer.json lists the
pairs that may be joined. One pair a token is enough: neighbours that make a token were joined from
the bytes inside of it, as they are in the token alone, so they are its last two parts there.
"""

import base64
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ats_jax.data.tokens.special import with_special


class Encoding(NamedTuple):
  """What a rank file does not say.

  Attributes:
    pattern: cuts text into words.
    special: id by name, of the special tokens.
    ranks: how many the file has; None = not known.
  """

  pattern: str
  special: Mapping[str, int]
  ranks: int | None = None


_R50K = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
  rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
  rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
  r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
# By the name of the file. Patterns are those of tiktoken, in words that `tokenizers` has.
ENCODINGS = {
  "r50k_base": Encoding(_R50K, {"<|endoftext|>": 50256}, 50256),
  "p50k_base": Encoding(_R50K, {"<|endoftext|>": 50256}, 50280),
  "cl100k_base": Encoding(
    _CL100K, {"<|endoftext|>": 100257, **_FIM, "<|endofprompt|>": 100276}, 100256
  ),
  "o200k_base": Encoding(_O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, 199998),
}


def converted(raw: bytes, encoding: Encoding) -> dict[str, Any]:
  """The tokenizer.json of a rank file.

  Args:
    raw: the file.
    encoding: the rest.

  Raises:
    ValueError: if the file is not of such ranks, or the pattern is none.
  """
  ranks = _ranks(raw)
  if encoding.ranks is not None and len(ranks) != encoding.ranks:
    raise ValueError(f"it has {len(ranks):,} ranks, and that encoding has {encoding.ranks:,}")
  taken = set(ranks.values()).intersection(encoding.special.values())
  if taken:
    raise ValueError(f"id {min(taken)} is of a special token and of a rank")
  vocab = {_spelled(token): rank for token, rank in ranks.items()}
  merges = [(_spelled(left), _spelled(right)) for left, right in merged_pairs(ranks)]
  inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
  inner.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(tokenizers.Regex(encoding.pattern), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])  # fmt: skip
  inner.decoder = decoders.ByteLevel()
  return with_special(inner.to_str(), encoding.special)


def is_ranks(raw: bytes) -> bool:
  """Whether a file begins as one of ranks does."""
  return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", raw) is not None


def _ranks(raw: bytes) -> dict[bytes, int]:
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(raw.splitlines(), 1):
    if not line.strip():
      continue
    try:
      token, rank = line.split()
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as e:
      raise ValueError(f"line {number} is not a token in base64 and its rank") from e
  missing = [i for i in range(256) if bytes([i]) not in ranks]
  if missing:
    raise ValueError(f"it has no rank for the byte {missing[0]}, so some text has no ids")
  if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
    raise ValueError("two tokens have the same rank, or one is negative")
  return ranks


def merged_pairs[T: (bytes, str)](ranks: Mapping[T, float]) -> Iterator[tuple[T, T]]:
  """Yield the two tokens that each token is merged from, in the order of ranks.

  Args:
    ranks: of all tokens; their items (bytes or characters) are tokens too.
  """
  for token in sorted(ranks, key=ranks.__getitem__):
    cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
    cuts = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
    yield from cuts if len(cuts) < 2 else _last_two(token, ranks)


def _last_two[T: (bytes, str)](token: T, ranks: Mapping[T, float]) -> list[tuple[T, T]]:
  """The parts before the last joint of a token by itself; none if it is not reached."""
  parts = [token[i : i + 1] for i in range(len(token))]
  while len(parts) > 2:
    pairs = [ranks.get(left + right) for left, right in itertools.pairwise(parts)]
    known = [rank for rank in pairs if rank is not None]
    if not known:
      return []
    at = pairs.index(min(known))
    parts[at : at + 2] = [parts[at] + parts[at + 1]]
  return [(parts[0], parts[1])]


def _alphabet() -> dict[int, str]:
  """How ByteLevel spells a byte: printable ones as themselves, the others from U+0100 on."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = sorted(set(range(256)) - set(printable))
  return {**{b: chr(b) for b in printable}, **{b: chr(256 + n) for n, b in enumerate(others)}}


ALPHABET = _alphabet()


def _spelled(token: bytes) -> str:
  return "".join(map(ALPHABET.__getitem__, token))
