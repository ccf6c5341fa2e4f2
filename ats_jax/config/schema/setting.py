"""One setting: its default, and what the tools need to know of it; kinds of a section."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ats_jax.extensions import Registry


@runtime_checkable
class Checked(Protocol):
  """A section with rules of its own."""

  def check(self, cfg: Any) -> None:
    """Raise a ValueError if the whole config `cfg` breaks one."""


@runtime_checkable
class LengthChecked(Protocol):
  """A section with rules about the length of the run."""

  def check_length(self, cfg: Any) -> None:
    """Raise a ValueError if the whole config `cfg`, whose `num_steps` is known, breaks one."""


class Condition(NamedTuple):
  """What must hold for a setting to have an effect.

  Attributes:
    setting: the dotted name of another setting.
    words: what that must be, for messages: "moe.num_experts above 0".
    holds: whether a value of it is that; it gets those of `beside` too.
    beside: dotted names of further settings that it is about.
    of_flags: it concerns only who sets the setting by a flag: a file or a preset that others change
      may say what has no effect any more.
  """

  setting: str
  words: str
  holds: Callable[..., bool]
  beside: tuple[str, ...] = ()
  of_flags: bool = False

  def is_met(self, cfg: Any) -> bool:
    """Whether it holds of a whole config."""
    return self.holds(*(operator.attrgetter(n)(cfg) for n in (self.setting, *self.beside)))

  def is_met_by(self, flat: Mapping[str, Any]) -> bool:
    """Whether it holds of the flat values of a config."""
    return self.holds(*(flat[name] for name in (self.setting, *self.beside)))


def of_flags(condition: Condition) -> Condition:
  """The condition, of who sets the setting by a flag only."""
  return condition._replace(of_flags=True)


def when(setting: str, *values: Any, above: float | None = None, no: Any = None) -> Condition:
  """The condition that a setting is on, one of `values`, more than `above`, or anything but `no`.

  Args:
    setting: its dotted name.
    values: any of these. Without these, `above` and `no`: anything but False, 0 and "".
    above: more than this number.
    no: not this value.
  """
  if values:
    words = f"{setting}={' or '.join(str(value) for value in values)}"
    return Condition(setting, words, lambda value: value in values)
  if above is not None:
    return Condition(setting, f"{setting} above {above:g}", lambda value: value > above)
  if no is not None:
    return Condition(setting, f"{setting} other than {no}", lambda value: value != no)
  return Condition(setting, setting, bool)


def setting(
  default: Any,
  doc: str,
  *,
  unit: str = "",
  low: float | None = None,
  high: float | None = None,
  choices: "tuple[str, ...] | Registry | Kinds" = (),
  resume: str = "fixed",
  needs: Condition | Sequence[Condition] = (),
  elements: "Kinds | None" = None,
  training: bool = False,
) -> Any:
  """Declare one setting.

  Args:
    default: its value when nothing is said.
    doc: what it means, one sentence.
    unit: what it counts.
    low: smallest legal value.
    high: largest legal value.
    choices: the legal words; of a registry, those that are registered when it is looked at.
    resume: "fixed" if a workdir must be resumed with the same value, "free" if it may change.
    needs: without it, or any of them, the setting has no effect, and only the default is legal.
    elements: of a list of dataclasses, the kinds that each of them is one of.
    training: of a section of the model: it decides how that is trained, and nothing that a trained
      one computes.
  """
  needs = (needs,) if isinstance(needs, Condition) else tuple(needs)
  metadata = dict(
    doc=doc, unit=unit, low=low, high=high, choices=choices, resume=resume, needs=needs,
    elements=elements, training=training,
  )  # fmt: skip
  return dataclasses.field(default=default, metadata=metadata)


class Kinds:
  """The kinds of a section: a dataclass each, chosen by the value of a field called `name`.

  All are subclasses of one base, which holds the settings that every kind has:

    SCALINGS = Kinds("model.rope_scaling", "how rotary frequencies are lowered")

    @dataclasses.dataclass(frozen=True)
    class Scaling:
      name: str = SCALINGS.tag("none")

    @SCALINGS.register
    @dataclasses.dataclass(frozen=True)
    class Linear(Scaling):
      name: str = SCALINGS.tag("linear")
      factor: float = setting(1.0, "...")

    class ModelConfig:
      rope_scaling: Scaling = section(SCALINGS, "none")
  """

  TAG = "name"

  def __init__(
    self, path: str, doc: str, *, resume: str = "fixed", registry: Registry | None = None
  ):
    """Make an empty one.

    Args:
      path: of the section in a config, e.g. "model.rope_scaling".
      doc: what the choice decides.
      resume: as of `setting`, of the choice.
      registry: of the parts that the kinds are settings of, to which users may add; a part that was
        registered without settings of its own is a kind that has those of the base alone.
    """
    self.path, self._doc, self._resume, self._registry = path, doc, resume, registry
    self._classes: dict[str, type] = {}
    self.default_name = ""  # `section` says it

  def tag(self, name: str) -> Any:
    """The field that says of which kind a section is."""
    return setting(name, self._doc, choices=self, resume=self._resume)

  def register[C: type](self, cls: C) -> C:
    """Decorate the dataclass of a kind."""
    assert self._registry is None, "the kinds of a registry have parts: use `of_part`"
    self._classes[self._name(cls)] = cls
    return cls

  def of_part[C: type](self, place: str) -> Callable[[C], C]:
    """Decorate the dataclass of a kind, and register the part whose settings it has.

    Args:
      place: "module:attribute" of the part, which is imported when it is asked for.
    """

    def add(cls: C) -> C:
      assert self._registry is not None
      self._registry.late(place, self._name(cls), settings=cls)
      return cls

    return add

  def _name(self, cls: type) -> str:
    (name,) = (f.default for f in dataclasses.fields(cls) if f.name == self.TAG)
    assert isinstance(name, str)
    return name

  @property
  def _known(self) -> Mapping[str, type | None]:
    return self._classes if self._registry is None else self._registry.added()

  @property
  def is_open(self) -> bool:
    """Whether an extension may add a kind."""
    return self._registry is not None

  @property
  def default(self) -> Any:
    """The section of the default kind, with the defaults of its settings."""
    return self[self.default_name]()

  @property
  def base(self) -> type:
    """The class that all kinds derive from."""
    cls = next(cls for cls in self._known.values() if cls is not None)
    return next(c for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c))

  def own(self, name: str) -> frozenset[str]:
    """The fields of a kind that the base does not have."""
    names = lambda cls: {field.name for field in dataclasses.fields(cls)}
    return frozenset(names(self[name]) - names(self.base))

  def with_field(self, field: str) -> tuple[str, ...]:
    """The kinds that have a field."""
    return tuple(n for n in self if any(f.name == field for f in dataclasses.fields(self[n])))

  def unknown(self, name: str) -> str:
    """A message that says that there is no such kind, and which there are."""
    if self._registry is not None:
      return self._registry.unknown(name)
    return f"{self.path}.{self.TAG}={name!r} is unknown. Choose one of: {', '.join(self)}."

  def __getitem__(self, name: str) -> type:
    """The class of a kind; the base for one that is not known here.

    Raises:
      ValueError: if an extension registered a part with settings that do not derive from the base.
    """
    cls = self._known.get(name) or self.base
    if not issubclass(cls, self.base):
      raise ValueError(
        f"{self.path}={name}: its settings, {cls.__name__}, must derive from "
        f"{self.base.__module__}.{self.base.__name__}."
      )
    return cls

  def __contains__(self, name: object) -> bool:
    return name in tuple(self)

  def __iter__(self) -> Iterator[str]:
    return iter(dict(self._known))


def section(kinds: Kinds, name: str) -> Any:
  """Declare a section that is one of several kinds, `name` if nothing is said."""
  kinds.default_name = name
  make: Callable[[], Any] = lambda: kinds.default
  return dataclasses.field(default_factory=make, metadata={"kinds": kinds})


def elements(value: Any) -> tuple[Any, ...]:
  """The elements of the value of a setting: of a list or a table, or the one that it is."""
  if isinstance(value, Table):
    return tuple(value.values())
  return value if isinstance(value, tuple) else (value,)


def kinds_of(field: dataclasses.Field) -> Kinds | None:
  """The kinds of a field that is a section of several; None for any other field."""
  return field.metadata.get("kinds")


class Table[V](dict[str, V]):
  """A mapping of names to values in a setting: hashable, compared like a dict."""

  def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
    return hash(frozenset(self.items()))
