"""Text <-> token ids: UTF-8 bytes, a BPE trained on the training text, or a tokenizer's file."""

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tokenizers
from absl import logging
from tokenizers import decoders, models, pre_tokenizers, trainers

from ats_jax.config.schema import DataConfig
from ats_jax.data.corpus import cache
from ats_jax.data.tokens.base import OfDocuments, Parts, Tokenizer, known_ids
from ats_jax.store import paths

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


class ByteTokenizer(OfDocuments):
  """256 ids for the bytes of UTF-8, then bos, eos and pad."""

  vocab_size = 259
  bos_id = 256
  eos_id = 257
  pad_id = 258
  fingerprint = "bytes-256+3"

  def to_fields(self) -> dict[str, Any]:
    """Return what a workdir keeps of it, as JSON."""
    return {"kind": "bytes"}

  def token_id(self, name: str) -> int | None:
    """Return None, as no token has a name."""
    del name

  def encode(self, text: str) -> list[int]:
    """Return the ids of `text`, none of them special."""
    return list(text.encode())

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each text, as integer arrays."""
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]

  def encode_parts(self, documents: Sequence[Sequence[str | int]]) -> list[Parts]:
    """Return the ids of documents of several parts."""
    return [_parts_of_bytes(parts) for parts in documents]

  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of `ids`, without special tokens."""
    return bytes([i for i in known_ids(ids, self) if i < 256]).decode(errors="replace")


def _parts_of_bytes(document: Sequence[str | int]) -> Parts:
  ids = [list(part.encode()) if isinstance(part, str) else [part] for part in document]
  part = np.repeat(np.arange(len(ids)), list(map(len, ids)))
  return Parts(np.array(list(itertools.chain(*ids)), np.uint32), part)


class JsonTokenizer(OfDocuments):
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

  def to_fields(self) -> dict[str, Any]:
    """Return what a workdir keeps of it, as JSON."""
    ids = {name: getattr(self, name) for name in ("bos_id", "eos_id", "pad_id", "vocab_size")}
    return {"kind": "tokenizers", **ids, "tokenizer": json.loads(self.to_json())}

  def token_id(self, name: str) -> int | None:
    """Return the id of the token of this name; None = there is none."""
    return self._inner.token_to_id(name)

  def special_tokens(self) -> dict[str, int]:
    """Return the id of each special token, by name."""
    added = json.loads(self._text).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token.get("special")}

  def to_json(self) -> str:
    """The tokenizer.json; with the four numbers it makes this tokenizer again."""
    return self._text

  def encode(self, text: str) -> list[int]:
    """Return the ids of `text`, none of them special."""
    text.encode()  # a lone surrogate is a ValueError here, a TypeError in the library
    return self._inner.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each text, as integer arrays."""
    encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(e.ids, np.uint32) for e in encodings]

  @functools.cached_property
  def _whole(self) -> Any:  # a second copy
    from ats_jax.data.tokens.whole import WholeTexts  # here: only conversations need it

    return WholeTexts(self._text)

  def encode_parts(self, documents: Sequence[Sequence[str | int]]) -> list[Parts]:
    """Return the ids of documents of several parts."""
    return self._whole.encode(documents)

  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of `ids`, without special tokens."""
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


class StreamDecoder:
  """Decodes ids as they come; the parts it returns join to `decode` of all ids.

  A part is held back while it ends inside a UTF-8 character.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
    """Begin.

    Args:
      tokenizer: decodes.
      prompt: the ids before the first one. The parts join to what `decode` of all has behind
        theirs; behind a special token a text begins, as when it is encoded.
    """
    self._tokenizer = tokenizer
    special = (at for at, i in enumerate(prompt, 1) if i in tokenizer.special_ids)
    self._ids = list(prompt[max(special, default=0) :])  # from the last place where a part began
    self._shown = len(self._ids)  # how many of them are in parts already returned
    self._context: str | None = None  # the text of those

  def push(self, token_id: int) -> str:
    """The text that `token_id` completes; "" if it completes none."""
    self._ids.append(token_id)
    text = self._new_text()
    if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
      return ""
    # The shown ids stay as context: some tokenizers spell a token differently at the beginning.
    self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
    self._context = None
    return text

  def finish(self) -> str:
    """What was held back, with U+FFFD for a character that was never completed."""
    text = self._new_text()
    self._ids, self._shown, self._context = [], 0, ""
    return text

  def _new_text(self) -> str:
    if self._context is None:
      self._context = self._tokenizer.decode(self._ids[: self._shown])
    return self._tokenizer.decode(self._ids)[len(self._context) :]


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
    return _from_file(cfg)
  if not corpus_fingerprint:
    return _bpe(_train_bpe(cfg.bpe_vocab_size, train_texts()))

  def build(folder: Path) -> dict[str, Any]:
    text = _train_bpe(cfg.bpe_vocab_size, train_texts())
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return {}

  sample = _sample_bytes(cfg.bpe_vocab_size)
  key = cache.digest("bpe", corpus_fingerprint, cfg.bpe_vocab_size, sample, _CUT)
  folder = cache.cached(cache.cache_root(cfg.cache_dir), f"bpe-{key}", build)
  return _bpe((folder.path / "tokenizer.json").read_text(encoding="utf-8"))


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
    if fields["kind"] == "sentencepiece":
      from ats_jax.data.tokens import sentencepiece_file

      return sentencepiece_file.from_fields(fields)
    ids = {name: int(fields[name]) for name in ("bos_id", "eos_id", "pad_id", "vocab_size")}
    return JsonTokenizer(json.dumps(fields["tokenizer"], ensure_ascii=False), **ids)
  except (KeyError, TypeError) as e:
    raise ValueError(f"it is that of a workdir, damaged: {e!r}") from e


def _from_file(cfg: DataConfig) -> Tokenizer:
  path = paths.parse(cfg.tokenizer).expanduser()
  try:
    raw = paths.read(path)
  except FileNotFoundError as e:
    raise ValueError(
      f"data.tokenizer is {str(path)!r}, and there is no such file. Expected 'bytes', 'bpe' or the "
      "path of a tokenizer.json, a .model of SentencePiece or a .tiktoken file."
    ) from e
  except OSError as e:
    raise ValueError(f"The tokenizer {str(path)!r} cannot be read: {e.strerror}.") from e
  config = _config_of(path)
  if path.suffix == ".model":
    return _sentencepiece(path, raw, config)
  is_ranks = path.suffix == ".tiktoken"
  try:
    spec = _of_ranks(path, raw, config, cfg.cache_dir) if is_ranks else paths.parse_json(raw)
    if isinstance(spec, dict) and "kind" in spec:  # that of a workdir
      return of_workdir(spec)
    if not isinstance(spec, dict) or "model" not in spec:
      raise ValueError("it has no field 'model'")
    ids = _parsed(json.dumps(spec)).get_vocab(with_added_tokens=True)
  except ValueError as e:
    kind = "rank file of tiktoken" if is_ranks else "tokenizer.json"
    raise ValueError(f"{str(path)!r} is not a {kind}: {e}.") from e
  names = _special_names(path, config, ids)
  special, vocab_size = _with_new_ids(names, ids)
  _keep_text(path, spec, special.values())
  tokenizer = JsonTokenizer(json.dumps(spec), vocab_size=vocab_size, **special)
  _check(tokenizer, path, [name for name in names.values() if name], spec)
  _say_special(path, names, special, vocab_size)
  return tokenizer


def _keep_text(path: paths.Path, spec: dict[str, Any], special: Collection[int]) -> None:
  """Switch off what would change text or draw its ids, where nothing else depends on it."""
  taking = []
  for token in spec.get("added_tokens") or []:
    token["special"] = token.get("special") or token["id"] in special
    if not token["special"] and (token.get("lstrip") or token.get("rstrip")):
      token["lstrip"] = token["rstrip"] = False
      taking.append(token["content"])
  if taking:
    logging.warning(
      "Tokenizer %s: tokens such as %r take the blanks beside them (lstrip, rstrip). In text they "
      "do not here, so that 'a %s b' comes back as it is.",
      path, taking[0], taking[0],
    )  # fmt: skip
  if isinstance(spec["model"], dict) and spec["model"].get("dropout"):
    logging.warning(
      "Tokenizer %s: its dropout of %s is off, as a text must have the same ids each time.",
      path, spec["model"]["dropout"],
    )  # fmt: skip
    spec["model"]["dropout"] = None


def _with_new_ids(
  names: Mapping[str, str | None], ids: Mapping[str, int]
) -> tuple[dict[str, int], int]:
  """The id of each role, and how many ids there are then.

  A role without a name gets a new id, but for padding: many published models have a full
  vocabulary and no token for it.
  """
  vocab_size = max(ids.values(), default=-1) + 1
  special = {}
  for role, name in names.items():
    if name:
      special[f"{role}_id"] = ids[name]
    elif role == "pad":  # no loss is taken of it, so it needs no id of its own
      special["pad_id"] = special["eos_id"]
    else:  # a new id, which no text can reach
      special[f"{role}_id"], vocab_size = vocab_size, vocab_size + 1
  return special, vocab_size


def _say_special(
  path: paths.Path, names: Mapping[str, str | None], special: Mapping[str, int], vocab_size: int
) -> None:
  added = {"bos": "added", "eos": "added", "pad": "as eos"}
  shown = ", ".join(f"{role} {name or added[role]} = {special[role + '_id']}"
                    for role, name in names.items())  # fmt: skip
  logging.info("Tokenizer %s: %d tokens, %s.", path, vocab_size, shown)


def _config_of(path: paths.Path) -> dict[str, Any]:
  """The tokenizer_config.json beside a file; {} if there is none.

  Raises:
    ValueError: if it is damaged.
  """
  config_path = path.parent / "tokenizer_config.json"
  try:
    config = paths.parse_json(paths.read(config_path))
  except FileNotFoundError:
    return {}
  except (OSError, ValueError) as e:
    raise ValueError(f"{config_path} cannot be read: {e}. Mend it or remove it.") from e
  if not isinstance(config, dict):
    raise ValueError(
      f"{config_path} holds {config!r:.40}, not a JSON object. Mend it or remove it."
    )
  return config


def _added_tokens(path: paths.Path, config: Mapping[str, Any]) -> dict[str, int]:
  """Id by name, of what a tokenizer_config.json adds to a file that has no place for it."""
  tokens = config.get("added_tokens_decoder") or {}
  try:
    return {token["content"]: int(i) for i, token in tokens.items()}
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise ValueError(
      f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder is not an object of tokens "
      "by id. Mend it or remove it."
    ) from e


def _of_ranks(
  path: paths.Path, raw: bytes, config: Mapping[str, Any], cache_dir: str
) -> dict[str, Any]:
  """A .tiktoken file as a tokenizer.json, which is cached."""
  from ats_jax.data.tokens import tiktoken_file

  encoding = tiktoken_file.ENCODINGS.get(path.stem)
  pattern_path = path.with_suffix(".pattern")
  if encoding is None and not pattern_path.is_file():
    raise ValueError(
      f"what cuts text into words is known of {', '.join(tiktoken_file.ENCODINGS)} alone, by the "
      f"name of the file. Rename it, or write its regular expression into {pattern_path}"
    )
  if encoding is None:
    pattern = paths.read(pattern_path).decode().rstrip("\r\n")
    encoding = tiktoken_file.Encoding(pattern, _added_tokens(path, config))

  def build(folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
      stack.push(_value_error)
      spec = tiktoken_file.converted(raw, encoding)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return {}

  key = cache.digest("tiktoken", hashlib.sha256(raw).hexdigest(), encoding)
  folder = cache.cached(cache.cache_root(cache_dir), f"tiktoken-{key}", build)
  return json.loads((folder.path / "tokenizer.json").read_text(encoding="utf-8"))


def _sentencepiece(path: paths.Path, raw: bytes, config: Mapping[str, Any]) -> Tokenizer:
  """A .model file.

  Raises:
    ValueError: if it is none, has no pieces for bytes, or the library is not installed.
  """
  from ats_jax.data.tokens import lossless, sentencepiece_file, tiktoken_file

  sentencepiece_file.library()
  added = _added_tokens(path, config)
  try:
    model = sentencepiece_file.without_collisions(raw, {*added, *_names_in(config).values()})
    inner = sentencepiece_file.processor(model)
  except ValueError as e:
    hint = " It is a rank file: name it NAME.tiktoken" if tiktoken_file.is_ranks(raw) else ""
    raise ValueError(f"{str(path)!r} is not a model of SentencePiece: {e}.{hint}") from e
  pieces = {inner.id_to_piece(i): i for i in range(inner.vocab_size())}
  names = _special_names(path, config, {**pieces, **added}, sentencepiece_file.control(inner))
  special, vocab_size = _with_new_ids(names, {**pieces, **added})
  new = {name: i for name, i in added.items() if name not in pieces}
  tokenizer = sentencepiece_file.SentencePieceTokenizer(
    model, added=new, vocab_size=vocab_size, **special
  )
  _say_changes(path, lossless.changes(tokenizer, {}))
  _say_special(path, names, special, vocab_size)
  return tokenizer


def _names_in(config: Mapping[str, Any]) -> dict[str, Any]:
  """Role -> what a tokenizer_config.json calls it."""
  names = {role: config.get(f"{role}_token") for role in _KNOWN_NAMES}
  names = {r: s.get("content") if isinstance(s, dict) else s for r, s in names.items()}
  return {role: name for role, name in names.items() if name}


def _special_names(
  path: paths.Path,
  config: Mapping[str, Any],
  ids: Mapping[str, int],
  own: Mapping[str, str | None] | None = None,
) -> dict[str, str | None]:
  """Role -> token: as a tokenizer_config.json says, else as the file does, else as known.

  Args:
    path: path of the tokenizer.
    config: content of the `tokenizer_config.json` beside it.
    ids: ids of all tokens, by name.
    own: special tokens that the file itself names, by role; None = it names none.
  """
  names: dict[str, str | None] = {}
  for role, known in _KNOWN_NAMES.items():
    named = _names_in(config).get(role)
    if named and (not isinstance(named, str) or named not in ids):
      raise ValueError(
        f"{path.parent / 'tokenizer_config.json'} says {role}_token is {named!r}, which "
        f"{path.name} does not hold. The two files belong to different tokenizers."
      )
    in_file = next((name for name in known if name in ids), None) if own is None else own[role]
    names[role] = named or in_file
  return names


def _check(
  tokenizer: JsonTokenizer, path: paths.Path, names: list[str], spec: Mapping[str, Any]
) -> None:
  from ats_jax.data.tokens import lossless  # here: runs with a tokenizer of their own need none

  special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
  for name in names:
    if special.intersection(tokenizer.encode(name)):
      raise ValueError(
        f"{str(path)!r} encodes the text {name!r} as its special token, so a document could end "
        "itself. Use a tokenizer whose model does not hold its special tokens as words."
      )
  changes = lossless.changes(tokenizer, spec)
  lost = next((change for change in changes if not change.kind), None)
  if not lost:
    _say_changes(path, changes)
    return
  byte = lossless.missing_byte(lost.text, spec)
  raise ValueError(
    f"{str(path)!r} is not lossless: {lost}. "
    + (f"Its vocabulary has no token for the byte 0x{byte:02X}. " if byte is not None else "")
    + "Use a tokenizer without lower-casing, stripping or unknown tokens, such as byte-level BPE."
  )


def _say_changes(path: paths.Path, changes: Sequence[object]) -> None:
  """Name what does not come back, if anything, by an example of each kind."""
  if changes:
    logging.warning(
      "Tokenizer %s changes some text before it encodes it, so that a model never sees the "
      "difference: %s.",
      path, "; ".join(map(str, changes)),
    )  # fmt: skip
