"""The section `data.format`: what the files of a text hold, and how that is written for a model."""

import dataclasses
from typing import Any, ClassVar, Self

from ats_jax.config.schema.filters import ChangesText
from ats_jax.config.schema.setting import Kinds, Table, setting, when

# Who speaks in a conversation.
ROLES = ("system", "user", "assistant", "tool")
# Templates by name (data.chat.templates), and the word for the tokenizer's own.
TEMPLATES = ("chatml", "llama3", "qwen", "mistral", "gemma", "plain")
OWN_TEMPLATE = "tokenizer"

FORMATS = Kinds("data.format", "what files hold: text, or conversations, which a template writes")


@dataclasses.dataclass(frozen=True)
class Format:
  """What every format has.

  Attributes:
    PART: "module:class" of what reads such files, a `data.text_format.TextFormat`; imported late.
    AUTO_PACKING: what `data.packing=auto` means.
    STREAMED: whether its documents can be tokenised while they are read (`data.reading`).
  """

  PART: ClassVar[str] = "ats_jax.data.text_format:TextFormat"
  AUTO_PACKING: ClassVar[str] = "concat"
  STREAMED: ClassVar[bool] = True

  name: str = FORMATS.tag("text")
  text_field: str = setting(
    "text",
    "the field of a JSON object or a table's row that holds a document of text; with format=chat, "
    "in the sources that are of text",
  )

  def of_source(self, name: str) -> "Format":
    """The format of the source of that name; "" = of what belongs to no source."""
    del name
    return self


@FORMATS.register
@dataclasses.dataclass(frozen=True)
class Text(Format):
  """Documents of text, or of token ids."""


@FORMATS.register
@dataclasses.dataclass(frozen=True)
class Chat(Format):
  """Conversations; of sources with names, those that are in `sources`."""

  PART: ClassVar[str] = "ats_jax.data.chat.format:ChatFormat"
  AUTO_PACKING: ClassVar[str] = "best_fit"  # a conversation is not cut
  STREAMED: ClassVar[bool] = False

  name: str = FORMATS.tag("chat")
  text_field: str = setting(
    "text",
    "the field that holds a document, in the sources that are of text",
    needs=when("data.format.sources"),
  )
  template: str = setting(
    "chatml",
    "how conversations are written: 'chatml', 'llama3', 'qwen', 'mistral', 'gemma', 'plain', "
    "'tokenizer' (the one beside data.tokenizer) or a .jinja file",
  )
  sources: tuple[str, ...] = setting(
    (),
    "names of data.sources and data.validation_sets whose files are of conversations, where others "
    "are of text; empty = all are",
  )
  weights: Table[float] = setting(
    Table(assistant=1.0),
    "weight in the loss of what each role says; one that is not named has none",
    low=0.0,
    high=1.0,
  )
  answers: str = setting(
    "all",
    "which answers of a conversation are in the loss: 'all', or the 'last' one",
    choices=("all", "last"),
  )
  marks: bool = setting(
    True, "take as an answer what a template's {% generation %} marks enclose, where it has some"
  )

  def of_source(self, name: str) -> "Self | Text":
    """Conversations, or text for a source that `sources` does not name."""
    if self.sources and name not in self.sources:
      return Text(text_field=self.text_field)
    return dataclasses.replace(self, sources=(), text_field=Format.text_field)

  def check(self, cfg: Any) -> None:
    """Refuse an unknown template, sources or roles, and what would change or cut conversations."""
    data, template = cfg.data, self.template
    if template not in (*TEMPLATES, OWN_TEMPLATE) and not template.endswith(".jinja"):
      raise ValueError(
        f"data.format.template={template!r} is unknown. Choose one of: {', '.join(TEMPLATES)}; "
        f"{OWN_TEMPLATE} for the one beside data.tokenizer; or the path of a .jinja file."
      )
    for source in self.sources:
      if source not in {*data.sources, *data.validation_sets}:
        raise ValueError(
          f"data.format.sources: {source!r} is no name of data.sources or data.validation_sets."
        )
    if self.sources and not {*self.sources} & {*data.sources}:
      raise ValueError(
        f"data.format.sources={list(self.sources)} names no source of data.sources, so that no "
        "conversation would be trained on. Name one, or use data.format=text."
      )
    for role in self.weights:
      if role not in ROLES:
        raise ValueError(
          f"data.format.weights: there is no role {role!r}. The roles are {', '.join(ROLES)}."
        )
    if not self.weights.get("assistant"):
      raise ValueError(
        "data.format.weights leaves the end of an answer out of the loss, so a model would never "
        "learn to stop. Give the assistant a weight, e.g. assistant=1."
      )
    if data.packing == "concat":
      raise ValueError(
        "data.packing=concat cuts conversations at the ends of rows, so that answers lose their "
        "questions. Leave data.packing at auto, or set data.packing=best_fit."
      )
    for one in data.filters:
      if isinstance(one, ChangesText):
        raise ValueError(
          f"data.filters: {one.name} changes text, and data.format={self.name} reads "
          "conversations, which are kept as they are or dropped. Leave it out; text beside them "
          "can be filtered by `ats-jax data prepare` first."
        )


@FORMATS.register
@dataclasses.dataclass(frozen=True)
class Pairs(Chat):
  """Pairs of answers, of which one is preferred.

  Attributes:
    LOSSES: those that learn from them, in words.
  """

  PART: ClassVar[str] = "ats_jax.data.chat.preference:PreferenceFormat"
  LOSSES: ClassVar[str] = "dpo, orpo, simpo or reward"

  name: str = FORMATS.tag("preference")

  def check(self, cfg: Any) -> None:
    """Refuse what rows of pairs cannot be beside."""
    super().check(cfg)
    data = cfg.data
    if cfg.step.loss.name == "cross_entropy":
      raise ValueError(
        f"data.format={self.name} with step.loss=cross_entropy would learn the bad answers too. "
        f"Set step.loss to {self.LOSSES}."
      )
    if data.sources:
      raise ValueError(
        f"data.format={self.name} with data.sources: rows of pairs are not mixed with others. Put "
        "all pairs into data.paths."
      )
    if data.order.name != "shuffled":
      raise ValueError(
        f"data.order={data.order.name} with data.format={self.name}: pairs come at random. Set "
        "data.order=shuffled."
      )
    if data.max_segments < 2:
      raise ValueError(
        f"data.max_segments={data.max_segments} has no room for a pair. Set it to at least 2."
      )


@FORMATS.register
@dataclasses.dataclass(frozen=True)
class Labelled(Pairs):
  """Answers that are desirable or not, each beside an answer to another question."""

  PART: ClassVar[str] = "ats_jax.data.chat.labelled:LabelledFormat"
  LOSSES: ClassVar[str] = "kto"

  name: str = FORMATS.tag("labelled")
