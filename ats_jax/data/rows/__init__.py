"""A corpus to packed rows in the order of training, and rows to batches; the orders by name."""

from ats_jax.config.schema import DataConfig
from ats_jax.data.rows.contract import RowOrder, TrainingDocuments, TrainRows
from ats_jax.extensions import orders


class Shuffled(RowOrder):
  """All documents packed together, and all rows in random order."""

  def rows(self, cfg: DataConfig, documents: TrainingDocuments, seed: int) -> TrainRows:
    """Pack all documents."""
    return documents.pack(cfg, seed, documents.indices, "train")


def row_order(cfg: DataConfig) -> RowOrder:
  """The order that `data.order` names.

  Raises:
    ValueError: if there is none, or what is registered makes none.
  """
  order = orders.find(cfg.order.name)
  made = order() if callable(order) else None
  if not isinstance(made, RowOrder):
    raise ValueError(
      f"data.order={cfg.order.name}: its extension registered {order!r:.80}. Register a class that "
      "derives from ats_jax.data.rows.contract.RowOrder."
    )
  return made
