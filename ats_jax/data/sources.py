"""What a run trains on and is evaluated on: one text, or named sources that are mixed."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from absl import logging

from ats_jax.config.schema import DataConfig
from ats_jax.config.schema import mixture as spec
from ats_jax.config.schema.setting import Table
from ats_jax.data.corpus import cache, prepared
from ats_jax.data.rows.contract import NoRows, Rows, TrainRows
from ats_jax.data.splits import (
  TextFiles,
  find_documents,
  given_tokenizer,
  open_datasets,
  open_split,
)
from ats_jax.data.text.source import MissingTextError
from ats_jax.data.tokens.tokenizer import Tokenizer, build_tokenizer

if TYPE_CHECKING:  # imported by runs on a mixture
  from ats_jax.data.rows.schedule import MixturePhase

HELD_OUT = "held_out"  # in a checkpoint, the fingerprints of the evaluation sets by name
_SHARES = 10_000  # in how many parts sizes are rounded, where they make the weights


@dataclasses.dataclass(frozen=True)
class EvalSet:
  """Held-out rows to be scored.

  Attributes:
    name: what its metrics are called after; "" = the main set, whose loss decides which checkpoint
      is best.
    dataset: rows of the set.
  """

  name: str
  dataset: Rows

  @property
  def prefix(self) -> str:
    """Of its metrics' names."""
    return f"eval/{self.name}/" if self.name else "eval/"


def open_eval_sets(cfg: DataConfig, main: Rows) -> tuple[EvalSet, ...]:
  """The validation split, if it has rows, and what has a name.

  These are what each source of a mixture holds out, and `data.validation_sets`.

  Args:
    cfg: as for `open_data`.
    main: the validation split that `open_data` gave.

  Raises:
    ValueError: as `open_split`, and for a name that two sets have.
  """
  sets = [EvalSet("", main)] if main.info.num_rows else []
  sets += [EvalSet(name, part) for name, part in main.info.parts.items() if part.info.num_rows]
  for name, paths in cfg.validation_sets.items():
    if name in [held_out.name for held_out in sets if name]:
      raise ValueError(
        f"data.validation_sets: {name!r} is what the source {name} of data.sources holds out. Give "
        "the set another name, or set data.validation_fraction=0."
      )
    held_out = open_split(_config_of_source(cfg, name), 0, paths, main.info.tokenizer)
    sets.append(EvalSet(name, held_out))
  return tuple(sets)


def check_same_text(sets: Iterable[EvalSet], saved: Mapping[str, str]) -> None:
  """Compare evaluation sets with those of a checkpoint; a set that one side lacks is not compared.

  Raises:
    ValueError: if one of the same name is of other text, so that its metrics could not be compared.
  """
  for held_out in sets:
    was, now = saved.get(held_out.name), held_out.dataset.info.fingerprint
    if was is not None and was != now:
      raise ValueError(
        f"the run was evaluated on other text: that of {held_out.prefix} has changed since "
        f"(fingerprint {was}, now {now}). Restore it, or use another --workdir."
      )


def open_data(cfg: DataConfig, seed: int) -> tuple[TrainRows, Rows]:
  """The training rows and the validation split, of one text or of all sources.

  Args:
    cfg: everything but `num_workers` and `prefetch` is read.
    seed: seed of the order of training documents and rows.

  Raises:
    ValueError: as `open_datasets`, with the name of the source.
  """
  if not cfg.sources:
    return _open(cfg, seed)
  from ats_jax.data.rows.mixture import Joined, Mixture  # here: one text needs no schedule
  from ats_jax.data.rows.schedule import Schedule

  of_source = {
    name: dataclasses.replace(
      _config_of_source(cfg, name), paths=paths, sources=Table(), validation_paths=()
    )
    for name, paths in cfg.sources.items()
  }
  main = cfg.validation_paths
  fraction = 0.0 if main else cfg.validation_fraction
  tokenizer = _tokenizer(cfg, of_source, fraction)
  train: dict[str, TrainRows] = {}
  held_out: dict[str, TrainRows] = {}
  for name, own in of_source.items():
    own = dataclasses.replace(own, validation_fraction=fraction)
    logging.info("Source %s:", name)
    try:
      train[name], held_out[name] = _open(own, seed, tokenizer)
    except ValueError as e:
      kind = MissingTextError if isinstance(e, MissingTextError) else ValueError
      raise kind(f"data.sources: {name}: {e}") from e
  largest = max((part.info.tokenizer for part in train.values()), key=lambda t: t.vocab_size)
  schedule = Schedule(
    mixture_phases(cfg, {name: part.info.num_rows for name, part in train.items()}),
    seed if cfg.mixture_order == "random" else None,
  )
  mixture = Mixture(train, schedule, largest)
  for number in range(len(schedule.phases)):
    logging.info("Mixture, phase %d: %s of rows.", number + 1, mixture.shares(number))
  if main:
    return mixture, open_split(_config_of_source(cfg, ""), 0, main, largest)
  return mixture, Joined(held_out, largest)


def streams(cfg: DataConfig) -> bool:
  """Whether a text is tokenised as it is read. What is prepared is there already."""
  is_streamed = cfg.reading.is_streamed and cfg.format.STREAMED
  return is_streamed and not prepared.folder_of(cfg.paths)


def _open(
  cfg: DataConfig, seed: int, tokenizer: Tokenizer | None = None
) -> tuple[TrainRows, TrainRows]:
  """Return the training and validation rows of one text, as `open_datasets` does."""
  if not streams(cfg):
    return open_datasets(cfg, seed, tokenizer)
  from ats_jax.data.rows.stream import open_stream

  train, main = open_stream(cfg, seed, tokenizer), cfg.validation_paths
  tokenizer = train.info.tokenizer
  held_out = open_split(cfg, 0, main, tokenizer) if main else NoRows(tokenizer, cfg.seq_len)
  return train, held_out


def _config_of_source(cfg: DataConfig, name: str) -> DataConfig:
  """How to read the paths of that name."""
  return dataclasses.replace(cfg, format=cfg.format.of_source(name))


def _tokenizer(cfg: DataConfig, of_source: Mapping[str, DataConfig], fraction: float) -> Tokenizer:
  """The one tokenizer of all sources: that of `cfg`, of a prepared one, or made of all texts."""
  if given := given_tokenizer(cfg):
    return given
  for own in of_source.values():
    if folder := prepared.folder_of(own.paths):
      return prepared.load(folder, own).tokenizer.of_text

  def find(own: DataConfig) -> TextFiles:
    if not streams(own):
      return find_documents(own, fraction, None)
    from ats_jax.data.rows.stream import find_stream

    return find_stream(own)[0]

  files_of = [find(own) for own in of_source.values()]
  texts = lambda: _in_turn(files.train_texts() for files in files_of)
  keys = [files.bpe_key for files in files_of]
  return build_tokenizer(cfg, texts, corpus_fingerprint=cache.digest("mixture", keys))


def _in_turn(texts: Iterable[Iterator[str]]) -> Iterator[str]:
  """One of each in turn, until all have ended."""
  for group in itertools.zip_longest(*texts):
    yield from (text for text in group if text is not None)


def mixture_phases(cfg: DataConfig, sizes: Mapping[str, int]) -> "list[MixturePhase]":
  """The phases of a mixture in rows.

  Args:
    cfg: `mixture`, `phases`, `temperature`, `seq_len` and `batch_size` are read.
    sizes: rows of each source.

  Raises:
    ValueError: as `config.schema.mixture.parts`.
  """
  from ats_jax.data.rows.schedule import MixturePhase

  phases = spec.phases_of(cfg)
  if not phases:
    return [MixturePhase(tuple(by_size(sizes, cfg.temperature).values()), 0)]
  of_rows = []
  for phase in phases:
    parts = spec.parts(phase.weights, sizes)
    rows = sum(sizes[name] for name in parts)
    steps = spec.steps_of(phase, cfg.batch_size, cfg.seq_len, rows)
    of_rows.append(
      MixturePhase(tuple(parts.get(name, 0) for name in sizes), steps * cfg.batch_size)
    )
  return of_rows


def by_size(sizes: Mapping[str, int], temperature: float) -> dict[str, int]:
  """Parts in the ratio size^(1/temperature); each source has one at least.

  At a temperature of 1 they are exact as far as a period of `config.schema.mixture.MOST_PARTS` rows
  allows; else they are ten-thousandths, rounded.
  """
  divisor = math.gcd(*sizes.values())
  if temperature == 1.0 and sum(sizes.values()) // divisor <= spec.MOST_PARTS:
    return {name: size // divisor for name, size in sizes.items()}
  powers = {name: (size / max(sizes.values())) ** (1 / temperature) for name, size in sizes.items()}
  total = sum(powers.values())
  rounded = {
    name: Fraction(max(1, round(_SHARES * power / total))) for name, power in powers.items()
  }
  return spec.whole_parts(rounded)
