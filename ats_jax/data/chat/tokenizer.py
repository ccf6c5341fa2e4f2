"""A tokenizer that knows a template: its special tokens have ids that no text can produce."""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from absl import logging

from ats_jax.config.schema.text_format import OWN_TEMPLATE, TEMPLATES, Chat
from ats_jax.data.chat.conversation import Conversation, MalformedError, Message
from ats_jax.data.chat.jinja import JinjaTemplate
from ats_jax.data.chat.segments import BOS, EOS, ChatSegment
from ats_jax.data.chat.templates import PUBLISHED, Template
from ats_jax.data.tokens.base import OWN_NAMES, Parts, Tokenizer, known_ids
from ats_jax.store import paths

# What `transformers` calls the files of a template.
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"


class Form(NamedTuple):
  """A template as plain data, from which it can be made anew.

  Attributes:
    name: name of a published template; "" = `source` holds one in jinja.
    source: the jinja text.
    names: what that calls the tokenizer's own special tokens.
    special: names of special tokens that may be in the text.
    marks: `data.format.marks`.
  """

  name: str
  source: str = ""
  names: Mapping[str, str] = {}
  special: tuple[str, ...] = ()
  marks: bool = True

  @classmethod
  def of(cls, fields: Mapping[str, Any]) -> Self:
    """The form whose `_asdict` went through JSON.

    Raises:
      TypeError: if a field is missing, wrong or unknown.
    """
    return cls(**{**fields, "special": tuple(fields["special"])})

  def template(self) -> Template:
    """The template."""
    if self.name:
      return PUBLISHED[self.name]
    return JinjaTemplate(self.source, self.names, self.special, self.marks)


class Encoded(NamedTuple):
  """A conversation as arrays [tokens]: its ids, and their codes (`segments.py`)."""

  ids: np.ndarray
  codes: np.ndarray


class ChatTokenizer:
  """A tokenizer of text with the special tokens of a template; see `Tokenizer`.

  Attributes:
    inner: the tokenizer of the text between special tokens.
    form: the template.
    special: id by name, of the template's special tokens; those that `inner` does not have are new
      ids behind its own.
    bos_id: what conversations begin with: the special token with which a template in jinja always
      does, else that of `inner`.
  """

  def __init__(self, inner: Tokenizer, form: Form):
    """Find the ids.

    Raises:
      ValueError: if text could produce one of them.
    """
    assert not isinstance(inner, ChatTokenizer)
    self.inner, self.form = inner, form
    self.bos_id, self.eos_id, self.pad_id = inner.bos_id, inner.eos_id, inner.pad_id
    ids = {"bos_token": inner.bos_id, "eos_token": inner.eos_id, "pad_token": inner.pad_id}
    self.special = {name: ids[role] for role, name in form.names.items()}
    self.vocab_size = inner.vocab_size
    for name in form.template().special:
      token_id = inner.token_id(name)
      if name in self.special:
        continue
      if token_id is None:
        self.special[name], self.vocab_size = self.vocab_size, self.vocab_size + 1
      elif token_id in inner.encode(name):
        raise ValueError(
          f"the tokenizer encodes the text {name!r} as a special token of the chat template, so a "
          "turn could end itself. Mark it as special in the tokenizer.json."
        )
      else:
        self.special[name] = token_id
    self._special_ids = inner.special_ids | frozenset(self.special.values())
    self.bos_id = self._id(self._first_token())
    began = [] if self.bos_id == inner.bos_id else [self.bos_id]
    of_form = json.dumps([inner.fingerprint, form, self.special, *began], sort_keys=True)
    self.fingerprint = hashlib.sha256(of_form.encode()).hexdigest()[:32]

  def _first_token(self) -> str:
    """The name of the token that stands for `bos_id`."""
    if not self.form.source:
      return BOS
    user, firsts = Message("user", "a"), set()
    for turns in ((user,), (Message("system", "a"), user)):
      try:
        (first, *_) = self.template.render(Conversation(turns), prompt=True)
      except MalformedError:  # it has no place for such a turn
        continue
      firsts.add(first.text if first.special else BOS)
    return firsts.pop() if len(firsts) == 1 else BOS

  @functools.cached_property
  def template(self) -> Template:
    """What writes conversations."""
    return self.form.template()

  @property
  def special_ids(self) -> frozenset[int]:
    """The ids that no text has."""
    return self._special_ids

  @property
  def end_ids(self) -> frozenset[int]:
    """The special ids that end what a model writes, the ends of an answer among them."""
    return self.inner.end_ids | {self._id(name) for name in self.template.ends}

  def token_id(self, name: str) -> int | None:
    """Return the id of the token of this name; None = there is none."""
    return self.special[name] if name in self.special else self.inner.token_id(name)

  def special_tokens(self) -> dict[str, int]:
    """Return the id of each special token, by name, those of the template among them."""
    return {**self.inner.special_tokens(), **self.special}

  def encode(self, text: str) -> list[int]:
    """Return the ids of `text`, none of them special."""
    return self.inner.encode(text)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each text, as integer arrays."""
    return self.inner.encode_batch(texts)

  def encode_parts(self, documents: Sequence[Sequence[str | int]]) -> list[Parts]:
    """Return the ids of documents of several parts."""
    return self.inner.encode_parts(documents)

  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of `ids`, without special tokens."""
    return self.inner.decode(i for i in known_ids(ids, self) if i not in self._special_ids)

  def encode_segments(self, conversations: Sequence[Sequence[ChatSegment]]) -> list[Encoded]:
    """Ids of what a template wrote, encoded as one text, as others encode it.

    A document begins with `bos_id`, so the template's own is left out.
    """
    parts = [[self._id(s.text) if s.special else s.text for s in c] for c in conversations]
    encoded = zip(conversations, self.encode_parts(parts), strict=True)
    return [self._with_codes(segments, *document) for segments, document in encoded]

  def _with_codes(
    self, segments: Sequence[ChatSegment], ids: np.ndarray, part: np.ndarray
  ) -> Encoded:
    codes = np.array([s.code for s in segments], np.uint8)[part]
    begin = int(ids[:1].tolist() == [self.bos_id])
    return Encoded(ids[begin:], codes[begin:])

  def prompt(self, conversation: Conversation) -> list[int]:
    """What a model reads before it answers, bos first.

    Raises:
      MalformedError: if the template has no place for a turn.
    """
    segments = self.template.render(conversation, prompt=True)
    return [self.bos_id, *self.encode_segments([segments])[0].ids.tolist()]

  def question(self, text: str) -> list[int]:
    """Return what a model reads before it answers a user who says `text`."""
    return self.prompt(Conversation((Message("user", text),)))

  def template_files(self) -> dict[str, bytes]:
    """Return the ids that end an answer, and a template of jinja; one by name is no jinja."""
    ids = {"bos_token_id": self.inner.bos_id, "pad_token_id": self.pad_id}
    fields = {**ids, "eos_token_id": sorted(self.end_ids)}
    files = {GENERATION_FILE: json.dumps(fields).encode()}
    return files | ({TEMPLATE_FILE: self.form.source.encode()} if self.form.source else {})

  def _id(self, name: str) -> int:
    own = {BOS: self.inner.bos_id, EOS: self.eos_id}
    return own[name] if name in own else self.special[name]

  @property
  def of_text(self) -> Tokenizer:
    """The tokenizer of the text inside a conversation."""
    return self.inner

  def to_fields(self) -> dict[str, Any]:
    """Return what a workdir keeps of it, as JSON."""
    return {"kind": "chat", "form": self.form._asdict(), "inner": self.inner.to_fields()}

  def __reduce__(self):
    return ChatTokenizer, (self.inner, self.form)


def prompt_of(tokenizer: Tokenizer, turns: Sequence[Message]) -> list[int]:
  """What a model reads before it answers the last of some turns, bos first.

  Raises:
    ValueError: if the tokenizer knows no conversations, or its template has no place for a turn.
  """
  if not isinstance(tokenizer, ChatTokenizer):
    raise ValueError(
      "this run was not trained on conversations (data.format is not chat), so it knows no turns. "
      "Continue a text instead: `ats-jax generate` without --chat."
    )
  return tokenizer.prompt(Conversation(tuple(turns)))


def with_template(tokenizer: Tokenizer, chat: Chat, path: str = "") -> "ChatTokenizer":
  """`tokenizer` with the template that `chat` names.

  Args:
    tokenizer: the tokenizer of the text between special tokens.
    chat: the format of the conversations.
    path: `data.tokenizer`, beside which the tokenizer's own template is.

  Raises:
    ValueError: if there is no such template, it is no jinja, it leaves the end of an answer out of
      the loss, or the weights of `chat` ask for more than it tells.
  """
  form = _form(tokenizer, chat, path)
  others = [r for r, w in chat.weights.items() if w and r != "assistant"]
  if others and not form.name:
    raise ValueError(
      f"data.format.weights weighs {' and '.join(others)}, but of jinja only "
      "the answers are known. Use data.format.weights=assistant=1, or a template by name: "
      f"{', '.join(TEMPLATES)}."
    )
  made = ChatTokenizer(tokenizer, form)
  added = {name: i for name, i in made.special.items() if i >= made.inner.vocab_size}
  shown = ", ".join(f"{name} = {i}" for name, i in added.items()) or "none"
  logging.info(
    "Chat template %s: answers end with one of the ids %s; special tokens that were added: %s.",
    chat.template, sorted(made.end_ids), shown,
  )  # fmt: skip
  return made


def _form(tokenizer: Tokenizer, chat: Chat, path: str) -> Form:
  name = chat.template
  if name in TEMPLATES:
    return Form(name)
  source = _read(name) if name != OWN_TEMPLATE else _own_template(path)
  if isinstance(source, Form):
    return source
  special = tokenizer.special_tokens()
  by_id = {i: token for token, i in special.items()}
  ids = {
    "bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id
  }  # fmt: skip
  names = {role: by_id.get(i, OWN_NAMES[role]) for role, i in ids.items()}
  return Form("", source, names, tuple(sorted({*special, *names.values()})), chat.marks)


def _read(name: str) -> str:
  try:
    return paths.read(paths.parse(name).expanduser()).decode()
  except (OSError, UnicodeDecodeError) as e:
    raise ValueError(f"data.format.template={name!r} cannot be read: {e}.") from e


def has_own_template(tokenizer: str) -> bool:
  """Whether a template stands beside a tokenizer.json, or is that of a run.

  Raises:
    ValueError: if a file cannot be read.
  """
  return _find_template(tokenizer) is not None


def _own_template(tokenizer: str) -> str | Form:
  """The jinja text beside a tokenizer.json, or the form of a run's.

  Raises:
    ValueError: if there is none.
  """
  template = _find_template(tokenizer)
  if template is None:
    raise ValueError(
      f"data.format.template=tokenizer, but beside data.tokenizer={tokenizer!r} there is neither a "
      "chat_template.jinja nor a tokenizer_config.json with a chat_template. Name a .jinja file, "
      f"or one of {', '.join(TEMPLATES)}."
    )
  return template


def _find_template(tokenizer: str) -> str | Form | None:
  path = paths.parse(tokenizer).expanduser()
  fields = _object(path)
  if fields.get("kind") == "chat":
    return Form.of(fields["form"])
  if (path.parent / TEMPLATE_FILE).is_file():
    return _read(str(path.parent / TEMPLATE_FILE))
  template = _object(path.parent / "tokenizer_config.json").get("chat_template")
  if isinstance(template, list):  # several by name
    template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
  return template if isinstance(template, str) else None


def _object(path: paths.Path) -> dict[str, Any]:
  """What a JSON file holds; {} if there is none, or it holds no object.

  Raises:
    ValueError: if it cannot be read.
  """
  if not path.is_file():
    return {}
  text = _read(str(path))
  try:
    value = paths.parse_json(text)
  except ValueError as e:
    raise ValueError(f"{path} cannot be read: {e}.") from e
  return value if isinstance(value, dict) else {}
