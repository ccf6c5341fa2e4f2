"""What a run is made of by name, and what users add to it: one registry for each kind of part.

A user's file that `extensions` in the config names (docs/guides/extending.md):

  from ats_jax.extensions import schedules

  @schedules.register("halved")
  def halved(progress, cfg, xp):
    return xp.where(progress < 0.5, 1.0, 0.5)

`--config.extensions=my_file.py --config.optimizer.schedule=halved` then trains with it. The parts
that come with this package are registered in the same way, many by `Registry.late`: the module of
such a part is imported when the part is asked for.
"""

import contextlib
import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

MARK = "#"  # between the name of an extension and the hash of its file
loaded: dict[str, str] = {}  # name -> hash, of this process; `config.extend` keeps it
# Whose registrations are being made; empty = this package's, or a script's.
_loading: list[str] = []


class _Place(NamedTuple):
  """Where a part is that is imported when it is asked for."""

  module: str
  attribute: str

  def load(self) -> Any:
    return getattr(importlib.import_module(self.module), self.attribute)


class _Entry(NamedTuple):
  part: Any
  owner: str
  settings: type | None


class Registry:
  """Parts of one kind by name. Iterates over the names, those of this package first."""

  def __init__(self, kind: str, setting: str, home: str):
    """Make an empty one.

    Args:
      kind: what the parts are, for messages.
      setting: that names one of them.
      home: the module that registers those of this package. It stands above this one, so it is
        imported when the first part is asked for.
    """
    self.kind, self.setting, self._home = kind, setting, home
    self._entries: dict[str, _Entry] = {}

  def register[P](self, *names: str, settings: type | None = None) -> Callable[[P], P]:
    """Decorate a part: it is known under `names` from now on.

    Args:
      names: which no other part has.
      settings: a dataclass of the settings that a config has with this part; None = those alone
        that it has with every part of this kind.

    Raises:
      ValueError: for a name that is taken, or that a list on the command line could not hold.
    """

    def add(part: P) -> P:
      owner = _loading[-1] if _loading else ""
      for name in names:
        if not name or set(name) & set(", \t\n"):
          raise ValueError(f"{self.kind} {name!r}: a name has no comma and no space.")
        if name in self._entries:
          whose = self._entries[name].owner or "ats_jax itself"
          raise ValueError(f"{self.kind} {name!r} is there already, of {whose}. Take another name.")
      self._entries.update(dict.fromkeys(names, _Entry(part, owner, settings)))
      return part

    return add

  def late(self, place: str, *names: str, settings: type | None = None) -> None:
    """Register a part that is imported when it is asked for.

    Args:
      place: "module:attribute" of the part.
      names: as of `register`.
      settings: as of `register`.

    Raises:
      ValueError: as `register`.
    """
    module, _, attribute = place.partition(":")
    self.register(*names, settings=settings)(_Place(module, attribute))

  def find(self, name: str) -> Any:
    """The part of a name.

    Raises:
      ValueError: if there is none.
    """
    if name not in self:
      raise ValueError(self.unknown(name))
    part = self._entries[name].part
    return part.load() if isinstance(part, _Place) else part

  def added(self) -> dict[str, type | None]:
    """The names that are registered by now, with the dataclass of their settings if they have one.

    Those of this package may be missing: nothing is imported for it.
    """
    return {name: entry.settings for name, entry in self._entries.items()}

  def owner(self, name: str) -> str:
    """The extension that a part is of, as `extensions` names it; "" = it comes with ats_jax."""
    assert name in self
    return self._entries[name].owner

  def unknown(self, name: str) -> str:
    """A message that says that there is no such part, and which there are."""
    near = difflib.get_close_matches(name, self, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
      f"{self.setting}={name!r} is unknown. Choose one of: {', '.join(self)}. {hint}To "
      f"use your own {self.kind}, name the file that registers it in `extensions`."
    )

  def forget(self, owner: str) -> None:
    """Take out all parts of an extension."""
    self._entries = {name: e for name, e in self._entries.items() if e.owner != owner}

  def open(self) -> None:
    """Register what this package has."""
    importlib.import_module(self._home)

  def __contains__(self, name: object) -> bool:
    self.open()
    return name in self._entries

  def __iter__(self) -> Iterator[str]:
    self.open()
    return iter(tuple(self._entries))


# What is registered under each is said at the built-in ones, in the module that is named.
writers = Registry("metric writer", "log.writers", "ats_jax.metrics.builtin")
schedules = Registry("schedule", "optimizer.schedule.name", "ats_jax.config.schema.schedule")
optimizers = Registry("optimizer", "optimizer.name", "ats_jax.config.schema.optimizer")
formats = Registry("data format", "the suffix of a file", "ats_jax.data.text.source")
losses = Registry("loss", "step.loss.name", "ats_jax.config.schema.loss")
routers = Registry("router", "moe.router", "ats_jax.config.schema.moe")
orders = Registry("order of rows", "data.order.name", "ats_jax.config.schema.row_order")

ALL: tuple[Registry, ...] = (
  writers, schedules, optimizers, formats, losses, routers, orders
)  # fmt: skip


@contextlib.contextmanager
def owned_by(owner: str) -> Iterator[None]:
  """Within it, what is registered is of `owner`; if it fails, nothing of it stays."""
  for registry in ALL:
    registry.open()  # names of ours are taken before a user's, and are not the user's
  _loading.append(owner)
  try:
    with contextlib.ExitStack() as undo:
      for registry in ALL:
        undo.callback(registry.forget, owner)
      yield
      undo.pop_all()
  finally:
    _loading.pop()


def are_loaded(entries: Iterable[str]) -> bool:
  """Whether this process has loaded all entries of the setting `extensions`."""
  parts = (entry.partition(MARK) for entry in entries)
  return all(digest and loaded.get(name) == digest for name, _, digest in parts)
