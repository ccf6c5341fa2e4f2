"""The section `data.order`: the order of training rows, and how many lengths they have."""

import dataclasses
from typing import Any

from ats_jax.config.schema.setting import Kinds, setting
from ats_jax.extensions import are_loaded, orders

ROW_ORDERS = Kinds(
  "data.order",
  "the order of training rows in each epoch: at random; at random among steps of rows of several "
  "lengths (buckets); of such, short documents first (length); or, of rows of one length, "
  "documents of frequent tokens first, in up to eight levels (difficulty)",
  registry=orders,
)
LEAST_LENGTH = 16  # of a row, where rows have several lengths


@dataclasses.dataclass(frozen=True)
class RowOrderConfig:
  """What every order has: its name. Unless it says otherwise, it looks at all of one text first."""

  name: str = ROW_ORDERS.tag("shuffled")

  @property
  def num_lengths(self) -> int:
    """Lengths of training rows, at most."""
    return 1

  def check(self, cfg: Any) -> None:
    """Refuse what has not all documents of one text, or needs rows of one length."""
    if self.name not in orders and not are_loaded(cfg.extensions):
      return  # an order of an extension has its own rules, which are not loaded
    what = f"data.order={self.name}"
    if cfg.data.sources:
      raise ValueError(
        f"{what} orders the documents of one text, and data.sources take turns row "
        "by row. Put all text into data.paths, or set data.order=shuffled."
      )
    if cfg.data.reading.is_streamed:
      raise ValueError(
        f"{what} looks at all documents before the first step, and data.reading="
        f"{cfg.data.reading.name} does not. Set data.reading=whole, or data.order=shuffled."
      )
    if self.num_lengths > 1:
      self._check_lengths(cfg, what)

  def _check_lengths(self, cfg: Any, what: str) -> None:
    """Refuse what needs rows of one length."""
    if cfg.mesh.stage > 1:
      raise ValueError(
        f"{what} with mesh.stage={cfg.mesh.stage}: a pipeline has rows of one length. Set "
        "data.order=shuffled, or mesh.stage=1."
      )
    if cfg.mod.routing != "none":
      raise ValueError(
        f"{what} with mod.routing={cfg.mod.routing}: a layer that skips tokens keeps a share of a "
        "row, so tokens would compete otherwise in each length. Set data.order=shuffled, or "
        "mod.routing=none."
      )
    if cfg.moe.num_experts and cfg.moe.dispatch == "capacity":
      raise ValueError(
        f"{what} with moe.dispatch=capacity: experts have places by row, of which a short one has "
        "few. Set moe.dispatch=dropless, or data.order=shuffled."
      )
    if LEAST_LENGTH % (ways := cfg.mesh.context):
      raise ValueError(
        f"{what} with mesh.context={ways}: shorter rows are multiples of {LEAST_LENGTH}, which it "
        f"does not divide. Use data.order=shuffled, or a divisor of {LEAST_LENGTH}."
      )


@ROW_ORDERS.of_part("ats_jax.data.rows:Shuffled")
@dataclasses.dataclass(frozen=True)
class Shuffled(RowOrderConfig):
  """All rows in random order."""

  def check(self, cfg: Any) -> None:
    """It goes with every source."""


@ROW_ORDERS.of_part("ats_jax.data.rows.lengths:LengthBuckets")
@dataclasses.dataclass(frozen=True)
class LengthBuckets(RowOrderConfig):
  """Rows of several lengths, by how long the documents are; steps of all lengths at random."""

  name: str = ROW_ORDERS.tag("buckets")
  lengths: int = setting(
    4,
    "lengths of training rows, at most: a step has rows of one of them and as many tokens as any; "
    "they are data.seq_len and halves of halves of it",
    low=2,
    high=4,
  )

  @property
  def num_lengths(self) -> int:
    """Lengths of training rows, at most."""
    return self.lengths

  def check(self, cfg: Any) -> None:
    """Refuse, besides, rows that cannot be halved."""
    super().check(cfg)
    if cfg.data.seq_len % (2 * LEAST_LENGTH):
      raise ValueError(
        f"data.order={self.name}: shorter rows are halves of data.seq_len={cfg.data.seq_len} and "
        f"multiples of {LEAST_LENGTH}. Use a multiple of {2 * LEAST_LENGTH}, better a power of two."
      )


@ROW_ORDERS.of_part("ats_jax.data.rows.lengths:ShortFirst")
@dataclasses.dataclass(frozen=True)
class ShortFirst(LengthBuckets):
  """Rows of several lengths, the shortest first in each epoch."""

  name: str = ROW_ORDERS.tag("length")


@ROW_ORDERS.of_part("ats_jax.data.rows.difficulty:EasyFirst")
@dataclasses.dataclass(frozen=True)
class EasyFirst(RowOrderConfig):
  """Rows of one length, in each epoch first those of documents whose tokens are frequent."""

  name: str = ROW_ORDERS.tag("difficulty")
