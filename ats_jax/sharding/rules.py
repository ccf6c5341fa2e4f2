"""The one table where logical axes (what a dimension means) meet mesh axes (where it lives)."""

import jax

# Mesh axes, outermost first. Neighbouring devices share the last axis, which talks the most.
MESH_AXES = ("data", "fsdp", "expert", "tensor")

# None = not sharded. A tuple shards one dimension over several mesh axes.
RULES: dict[str | None, str | tuple[str, ...] | None] = {
  None: None,
  # activations
  "batch": ("data", "fsdp", "expert"),
  "seq": None,
  "act_embed": None,
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "ff": "tensor",
  "vocab": "tensor",
  "choice": None,  # of a token among experts
  # parameters: `embed` is the d_model side of a matrix, sharded ZeRO-style over fsdp
  "layers": None,
  "embed": "fsdp",
  "norm": None,
  "experts": "expert",
  "router": None,  # experts as columns of the router
  # The lookup table is sharded over its rows only: sharding its width makes XLA fully
  # rematerialise the gather.
  "vocab_rows": ("tensor", "fsdp"),
  "table_embed": None,
}


def spec(*axes: str | None) -> jax.P:
  """Translate logical axis names to a PartitionSpec.

  Raises:
    ValueError: for an unknown name, or if two dimensions of one array use the same mesh axis.
  """
  unknown = [a for a in axes if a not in RULES]
  if unknown:
    raise ValueError(
      f"unknown logical axes {unknown}; sharding/rules.py knows {sorted(filter(None, RULES))}"
    )
  entries = [RULES[a] for a in axes]
  used = [m for e in entries if e for m in ((e,) if isinstance(e, str) else e)]
  if len(used) != len(set(used)):
    raise ValueError(f"logical axes {axes} shard two dimensions over one mesh axis: {entries}")
  return jax.P(*entries)
