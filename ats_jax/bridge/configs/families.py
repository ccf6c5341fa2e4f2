"""Families of which `config.json` can be read, and no weights: tables of the bridge's rows."""

from collections.abc import Mapping

from ats_jax.bridge.families.common import HeadDim, KVHeads, Rope, gemma, sizes
from ats_jax.bridge.family import Always, FieldRow

FIELDS: Mapping[str, tuple[FieldRow, ...]] = {
  "gemma": (
    *sizes(eps=1e-6, tied=True),
    KVHeads(16),
    HeadDim(256),
    Rope(),
    *gemma(),
    Always((("model.post_norms", False),)),
  ),
}
