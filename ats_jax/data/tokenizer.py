"""Text <-> token ids: UTF-8 bytes, a BPE trained on the training text, or a tokenizer.json."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import tokenizers
from absl import logging
from tokenizers import decoders, models, pre_tokenizers, trainers

from ats_jax import paths
from ats_jax.config.schema import DataConfig
from ats_jax.data import cache

BPE_SAMPLE_BYTES = 16 * 2**20  # of text at least, where there is so much
_BYTES_PER_ID = 256  # of text, for a vocabulary whose ids are all seen often enough
_LEAST_BYTES_PER_ID = 64
_ALWAYS_FITS = 512  # ids: 256 are bytes
# A word of the trainer's is any run of letters, of digits, of spaces or of other signs. Its time
# grows with the square of their length, so words are cut every 1,000 bytes, or up to three earlier:
# not inside a character, whose bytes after the first (128 to 191) ByteLevel spells as in brackets.
_CUT = r".{997,1000}(?![\u00a1-\u00ac\u00ae-\u00bf\u0122-\u0143])"
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
_TRAINING_WORDS = pre_tokenizers.Sequence(
  [_WORDS, pre_tokenizers.Split(tokenizers.Regex(_CUT), "isolated")]
)

# What published tokenizers call each special token, where no tokenizer_config.json says it.
_KNOWN_NAMES = {
  "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<|bos|>", "<|endoftext|>"),
  "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "<|eos|>"),
  "pad": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}
_PROBE = "a  b\n\n\tçé 漢字 🙂\u200d don't <x> 1234  \n"


class Tokenizer(Protocol):
  """What the rest of the system knows of a tokenizer.

  Attributes:
    vocab_size: ids are in [0, vocab_size), the special ones included.
    bos_id: the input before the first token of a document.
    eos_id: the target after the last token of a document.
    pad_id: fills the places without a document; never a target with loss.
    fingerprint: a hash of everything that decides the ids.
  """

  vocab_size: int
  bos_id: int
  eos_id: int
  pad_id: int
  fingerprint: str

  @property
  def special_ids(self) -> frozenset[int]:
    """Those that no text has."""
    ...

  @property
  def end_ids(self) -> frozenset[int]:
    """Of them, those that end what a model writes."""
    ...

  def token_id(self, name: str) -> int | None:
    """The id of the token that is called so; None = there is none."""
    ...

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, never a special one, whatever the text contains.

    Raises:
      ValueError: if the text holds a lone surrogate and so has no UTF-8 form.
    """
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """`encode` of each text as an integer array; uses all cores where the tokenizer can."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`; special ids are skipped, broken UTF-8 becomes U+FFFD.

    Raises:
      ValueError: if an id is outside [0, vocab_size).
    """
    ...


class _OfDocuments:
  """The special ids of a tokenizer that knows of documents, and of nothing inside them."""

  bos_id: int
  eos_id: int
  pad_id: int

  @property
  def special_ids(self) -> frozenset[int]:
    """See `Tokenizer`."""
    return frozenset((self.bos_id, self.eos_id, self.pad_id))

  @property
  def end_ids(self) -> frozenset[int]:
    """See `Tokenizer`."""
    return frozenset((self.eos_id,))


class ByteTokenizer(_OfDocuments):
  """256 ids for the bytes of UTF-8, then bos, eos and pad."""

  vocab_size = 259
  bos_id = 256
  eos_id = 257
  pad_id = 258
  fingerprint = "bytes-256+3"

  def token_id(self, name: str) -> int | None:
    """See `Tokenizer`: no token has a name."""
    del name

  def encode(self, text: str) -> list[int]:
    """See `Tokenizer.encode`."""
    return list(text.encode())

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """See `Tokenizer.encode_batch`."""
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    """See `Tokenizer.decode`."""
    return bytes(i for i in known_ids(ids, self) if i < 256).decode(errors="replace")


class JsonTokenizer(_OfDocuments):
  """A tokenizer of the `tokenizers` library: a trained BPE, or somebody's tokenizer.json.

  Its own special tokens are matched as plain text in `encode`; a post-processor that adds special
  tokens, padding and truncation are switched off.
  """

  def __init__(self, text: str, *, bos_id: int, eos_id: int, pad_id: int, vocab_size: int):
    self._text = json.dumps(json.loads(text), sort_keys=True)  # one form, one fingerprint
    self._inner = _parsed(self._text)
    self._inner.no_padding()
    self._inner.no_truncation()
    self._inner.encode_special_tokens = True  # the library's word for "as ordinary text"
    self.bos_id, self.eos_id, self.pad_id, self.vocab_size = bos_id, eos_id, pad_id, vocab_size
    self._special = {bos_id, eos_id, pad_id}
    ids = f"{bos_id},{eos_id},{pad_id},{vocab_size}"
    self.fingerprint = hashlib.sha256(f"{ids}\n{self._text}".encode()).hexdigest()[:32]

  def token_id(self, name: str) -> int | None:
    """See `Tokenizer`."""
    return self._inner.token_to_id(name)

  def special_tokens(self) -> dict[str, int]:
    """Id by name, of the tokens that the file calls special."""
    added = json.loads(self._text).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token.get("special")}

  def to_json(self) -> str:
    """The tokenizer.json; with the four numbers it makes this tokenizer again."""
    return self._text

  def encode(self, text: str) -> list[int]:
    """See `Tokenizer.encode`."""
    text.encode()  # a lone surrogate is a ValueError here, a TypeError in the library
    return self._inner.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """See `Tokenizer.encode_batch`."""
    encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(e.ids, np.uint32) for e in encodings]

  def decode(self, ids: Iterable[int]) -> str:
    """See `Tokenizer.decode`."""
    text_ids = [i for i in known_ids(ids, self) if i not in self._special]
    return self._inner.decode(text_ids, skip_special_tokens=False)

  def __reduce__(self):
    return _json_tokenizer, (self._text, self.bos_id, self.eos_id, self.pad_id, self.vocab_size)


def _parsed(text: str) -> tokenizers.Tokenizer:
  """The library's tokenizer of a tokenizer.json's text, or ValueError if it is none."""
  with contextlib.ExitStack() as stack:
    stack.push(_value_error)
    return tokenizers.Tokenizer.from_str(text)


def _value_error(
  kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
  if kind is Exception:  # the library has no kind of its own
    raise ValueError(str(error)) from error


def _json_tokenizer(text: str, bos_id: int, eos_id: int, pad_id: int, vocab_size: int):
  return JsonTokenizer(text, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id, vocab_size=vocab_size)


def known_ids(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
  """`ids` as integers, or ValueError for one that is not of the tokenizer."""
  known = [int(i) for i in ids]
  for i in known:
    if not 0 <= i < tokenizer.vocab_size:
      raise ValueError(f"Token id {i} is outside the vocabulary [0, {tokenizer.vocab_size}).")
  return known


class StreamDecoder:
  """Decodes ids as they come; the parts it returns join to `decode` of all ids.

  A part is held back while it ends inside a UTF-8 character.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._ids: list[int] = []  # from the last place where a part began
    self._shown = 0  # how many of them are in parts already returned

  def push(self, token_id: int) -> str:
    """The text that `token_id` completes; "" if it completes none."""
    self._ids.append(token_id)
    text = self._new_text()
    if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
      return ""
    # The shown ids stay as context: some tokenizers spell a token differently at the beginning.
    self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
    return text

  def finish(self) -> str:
    """What was held back, with U+FFFD for a character that was never completed."""
    text = self._new_text()
    self._ids, self._shown = [], 0
    return text

  def _new_text(self) -> str:
    context = self._tokenizer.decode(self._ids[: self._shown])
    return self._tokenizer.decode(self._ids)[len(context) :]


def build_tokenizer(
  cfg: DataConfig, train_texts: Callable[[], Iterable[str]], *, corpus_fingerprint: str = ""
) -> Tokenizer:
  """The tokenizer that `cfg.tokenizer` names.

  Args:
    cfg: `tokenizer`, `bpe_vocab_size` and `cache_dir` are read.
    train_texts: gives the training text; called only for a BPE that is not in the cache. Of it the
      first 16 MiB are used, or 256 bytes an id if that is more.
    corpus_fingerprint: names what `train_texts` gives. Without it the BPE is not cached.

  Raises:
    ValueError: if the file is missing or is not a lossless tokenizer, or there is no text.
  """
  if cfg.tokenizer == "bytes":
    return ByteTokenizer()
  if cfg.tokenizer != "bpe":
    return _from_file(paths.parse(cfg.tokenizer).expanduser())
  if not corpus_fingerprint:
    return _bpe(_train_bpe(cfg.bpe_vocab_size, train_texts()))

  def build(folder: Path) -> dict[str, Any]:
    (folder / "tokenizer.json").write_text(_train_bpe(cfg.bpe_vocab_size, train_texts()))
    return {}

  sample = _sample_bytes(cfg.bpe_vocab_size)
  key = cache.digest("bpe", corpus_fingerprint, cfg.bpe_vocab_size, sample, _CUT)
  folder = cache.cached(cache.cache_root(cfg.cache_dir), f"bpe-{key}", build)
  return _bpe((folder.path / "tokenizer.json").read_text())


def _sample_bytes(vocab_size: int) -> int:
  return max(BPE_SAMPLE_BYTES, _BYTES_PER_ID * vocab_size)


def _train_bpe(vocab_size: int, texts: Iterable[str]) -> str:
  sample, num_bytes = [], 0
  for text in texts:
    sample.append(text)
    num_bytes += len(text.encode())
    if num_bytes >= _sample_bytes(vocab_size):
      break
  if not num_bytes:
    raise ValueError(
      "There is no text to train a BPE on. Give some, or set data.tokenizer='bytes'."
    )
  logging.info("Training a BPE of %d ids on %.1f MB of text ...", vocab_size, num_bytes / 1e6)
  if num_bytes < _LEAST_BYTES_PER_ID * vocab_size and vocab_size > _ALWAYS_FITS:
    logging.warning(
      "%.2f MB of text is little for a vocabulary of %d: many of its ids will be words seen once "
      "or twice. --config.data.bpe_vocab_size=%d --config.model.vocab_size=0 would fit it.",
      num_bytes / 1e6, vocab_size, max(_ALWAYS_FITS, num_bytes // _BYTES_PER_ID),
    )  # fmt: skip
  inner = tokenizers.Tokenizer(models.BPE())
  inner.pre_tokenizer = _TRAINING_WORDS
  inner.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size - 3,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  inner.train_from_iterator(sample, trainer)
  inner.pre_tokenizer = _WORDS  # to encode a long word takes n log n: it need not be cut
  logging.info(
    "Trained a byte-level BPE of %d tokens (+ 3 special) on %.1f MB of training text.",
    inner.get_vocab_size(), num_bytes / 1e6,
  )  # fmt: skip
  return inner.to_str()


def _bpe(text: str) -> JsonTokenizer:
  # The special tokens are ids past the library's vocabulary, so no text can reach them.
  size = _parsed(text).get_vocab_size()
  return JsonTokenizer(text, bos_id=size, eos_id=size + 1, pad_id=size + 2, vocab_size=size + 3)


def of_workdir(fields: Mapping[str, Any]) -> Tokenizer:
  """The tokenizer of a run's text, from what `save_tokenizer` wrote.

  Raises:
    ValueError: if a field is missing or wrong.
  """
  try:
    if fields["kind"] == "chat":  # its template is for `data.chat.tokenizer` to read
      return of_workdir(fields["inner"])
    if fields["kind"] == "bytes":
      return ByteTokenizer()
    ids = {name: int(fields[name]) for name in ("bos_id", "eos_id", "pad_id", "vocab_size")}
    return JsonTokenizer(json.dumps(fields["tokenizer"], ensure_ascii=False), **ids)
  except (KeyError, TypeError) as e:
    raise ValueError(f"it is that of a workdir, damaged: {e!r}") from e


def _from_file(path: paths.Path) -> Tokenizer:
  try:
    spec = json.loads(paths.read(path))
    if isinstance(spec, dict) and "kind" in spec:  # that of a workdir
      return of_workdir(spec)
    if not isinstance(spec, dict) or "model" not in spec:
      raise ValueError("it has no field 'model'")
    ids = _parsed(json.dumps(spec)).get_vocab(with_added_tokens=True)
  except FileNotFoundError as e:
    raise ValueError(
      f"data.tokenizer is {str(path)!r}, and there is no such file. "
      "Expected 'bytes', 'bpe' or the path of a tokenizer.json."
    ) from e
  except OSError as e:
    raise ValueError(f"The tokenizer {str(path)!r} cannot be read: {e.strerror}.") from e
  except ValueError as e:
    raise ValueError(f"{str(path)!r} is not a tokenizer.json: {e}.") from e
  vocab_size = max(ids.values(), default=-1) + 1
  names = _special_names(path, ids)
  special = {}
  for role in ("bos", "eos", "pad"):
    if name := names[role]:
      special[role] = ids[name]
    else:  # a new id, which no text can reach
      special[role], vocab_size = vocab_size, vocab_size + 1
  for token in spec.get("added_tokens") or []:
    token["special"] = token.get("special") or token["id"] in special.values()
  tokenizer = JsonTokenizer(
    json.dumps(spec), bos_id=special["bos"], eos_id=special["eos"], pad_id=special["pad"],
    vocab_size=vocab_size,
  )  # fmt: skip
  _check(tokenizer, path, [name for name in names.values() if name])
  shown = ", ".join(f"{role} {names[role] or 'added'} = {special[role]}" for role in special)
  logging.info("Tokenizer %s: %d tokens, %s.", path, vocab_size, shown)
  return tokenizer


def _special_names(path: paths.Path, ids: dict[str, int]) -> dict[str, str | None]:
  """Role -> token, from the tokenizer_config.json beside `path` if there is one, else as known."""
  beside = path.parent / "tokenizer_config.json"
  try:
    config = json.loads(paths.read(beside))
  except FileNotFoundError:
    config = {}
  except (OSError, ValueError) as e:
    raise ValueError(f"{beside} cannot be read: {e}. Mend it or remove it.") from e
  if not isinstance(config, dict):
    raise ValueError(f"{beside} holds {config!r:.40}, not a JSON object. Mend it or remove it.")
  names: dict[str, str | None] = {}
  for role, known in _KNOWN_NAMES.items():
    said = config.get(f"{role}_token")
    said = said.get("content") if isinstance(said, dict) else said
    if said and (not isinstance(said, str) or said not in ids):
      raise ValueError(
        f"{beside} says {role}_token is {said!r}, which {path.name} does not hold. "
        "The two files belong to different tokenizers."
      )
    names[role] = said or next((name for name in known if name in ids), None)
  return names


def _check(tokenizer: JsonTokenizer, path: paths.Path, names: list[str]) -> None:
  special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
  for name in names:
    if special.intersection(tokenizer.encode(name)):
      raise ValueError(
        f"{str(path)!r} encodes the text {name!r} as its special token, so a document could end "
        "itself. Use a tokenizer whose model does not hold its special tokens as words."
      )
  back = tokenizer.decode(tokenizer.encode(_PROBE))
  if back != _PROBE:
    raise ValueError(
      f"{str(path)!r} is not lossless: {_PROBE!r} comes back as {back!r}. "
      "Use a tokenizer without lower-casing, stripping or unknown tokens, such as byte-level BPE."
    )
