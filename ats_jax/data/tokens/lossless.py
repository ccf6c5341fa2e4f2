"""Whether text comes back from its ids: what a tokenizer's file does is tried on text of its own.

The texts are the names and patterns that the file itself has, the bytes of UTF-8, samples of all of
Unicode, and blanks in all places.
"""

import itertools
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ats_jax.data.tokens.base import Tokenizer
from ats_jax.data.tokens.tiktoken_file import ALPHABET

_TEXTS = (
  "a", " a", "  a", "a ", "a  b", "a\t\n\n b", "\na", "a\r\nb\r", "a \n", "A b", "\u00e9",
  "e\u0301", "\ufb01 \u2460 \u212b", "\u6f22\u5b57", "\U0001f642\u200d", "don't , . !", "<x> 1234",
  "a\u2581b", "<0x41>", "<unk>", "[UNK]", "\ufffd", "\x00\x7f",
)  # fmt: skip
_CHUNK = 32  # characters of a text of samples
_STEP = 61  # between samples: odd, so that each last byte comes
_MOST_NAMES = 2000
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 does not have


class Change(NamedTuple):
  """A text, and what comes back from its ids."""

  text: str
  back: str

  def __str__(self) -> str:
    return f"{self.text!r} comes back as {self.back!r}"

  @property
  def kind(self) -> str:
    """What is changed, where that is harmless; "" = text is lost.

    Harmless are a blank in front, which SentencePiece puts there or takes away, its sign for a
    blank, and other forms of the same characters (Unicode's compatibility, NFKC).
    """
    if self.text.replace("\u2581", " ") == self.back:
      return "sign"
    if _but_for_a_blank(self.text, self.back):
      return "blank"
    form = lambda text: unicodedata.normalize("NFKC", text.replace("\u2581", " "))
    return "form" if _but_for_a_blank(form(self.text), form(self.back)) else ""


def _but_for_a_blank(text: str, back: str) -> bool:
  return text == back or text == f" {back}" or back == f" {text}"


def changes(tokenizer: Tokenizer, spec: Mapping[str, Any]) -> list[Change]:
  """The first change of each kind.

  Args:
    tokenizer: the tokenizer.
    spec: content of its tokenizer.json; {} = it has none.
  """
  back = lambda texts: [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode_batch(texts)]
  found: dict[str, Change] = {}
  for change in itertools.chain(
    _changed(back, [*_TEXTS, *_names(spec)]), _changed(back, _samples(), singly=True)
  ):
    found.setdefault(change.kind, change)
  return list(found.values())


def missing_byte(text: str, spec: Mapping[str, Any]) -> int | None:
  """A byte of a text for which a vocabulary of bytes has no token; None = there is none."""
  vocab = spec["model"].get("vocab") or ()
  vocab = {piece if isinstance(piece, str) else piece[0] for piece in vocab}
  spelled = "<0x{:02X}>".format if spec["model"].get("byte_fallback") else ALPHABET.__getitem__
  missing = (byte for byte in text.encode() if spelled(byte) not in vocab)
  of_bytes = sum(spelled(byte) in vocab for byte in set(range(256)) - _NEVER) > 200
  return next(missing, None) if of_bytes else None


def _changed(
  back: Callable[[list[str]], list[str]], texts: list[str], *, singly: bool = False
) -> Iterator[Change]:
  """Those that change; `singly` looks for the character that does it."""
  for text, other in zip(texts, back(texts), strict=True):
    if other != text:
      parts = list(_changed(back, [f"a{char}" for char in text])) if singly else []
      yield from parts or [Change(text, other)]


def _names(spec: Mapping[str, Any]) -> Iterator[str]:
  """What the file looks for in a text, by itself and between other characters."""
  added = (token["content"] for token in spec.get("added_tokens") or [])
  steps = [*_steps(spec.get("normalizer")), *_steps(spec.get("pre_tokenizer"))]
  patterns = (step.get("pattern", {}).get("String", "") for step in steps)
  for name in itertools.islice(filter(None, [*patterns, *added]), _MOST_NAMES):
    yield from (name, f"a{name}b", f"a \n {name} \n b", f"{name.upper()} {name.title()}")


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
  """A normaliser or a pre-tokenizer, or what a sequence of them consists of."""
  if isinstance(part, dict):
    inner = part.get("normalizers") or part.get("pretokenizers") or ()
    yield part
    yield from itertools.chain.from_iterable(map(_steps, inner))


def _samples() -> list[str]:
  """All characters of one and two bytes, and some of each block behind them."""
  codes: Iterable[int] = itertools.chain(range(0x800), range(0x800, 0x110000, _STEP))
  chars = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
  return ["".join(chars[i : i + _CHUNK]) for i in range(0, len(chars), _CHUNK)]
