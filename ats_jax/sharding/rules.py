"""Where logical axes (what a dimension means) meet mesh axes (where it lives): a table a plan."""

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax

# Mesh axes, outermost first. Neighbouring devices share the last axis, which talks the most.
MESH_AXES = ("stage", "data", "fsdp", "expert", "tensor")

# None = not sharded. A tuple shards one dimension over several mesh axes.
Rules = Mapping[str | None, str | tuple[str, ...] | None]
_DEFAULT: Rules = {
  None: None,
  # activations
  "batch": ("data", "fsdp", "expert"),
  "micro": "stage",  # micro-batches on their way into and out of a pipeline
  "rows": ("stage", "data", "fsdp", "expert"),  # of these micro-batches, before and behind it
  "seq": None,
  "act_embed": None,
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "latent": None,  # that heads are made of
  "ff": "tensor",
  "vocab": "tensor",
  "choice": None,  # of a token among experts
  # parameters: `embed` is the d_model side of a matrix, sharded ZeRO-style over fsdp
  "layers": "stage",  # of a stack
  "embed": "fsdp",
  "latent_rows": "fsdp",  # the latent's side of a matrix, like `embed`
  "norm": None,
  "experts": "expert",
  "router": None,  # experts as columns of the router
  # The lookup table is sharded over its rows only: sharding its width makes XLA fully
  # rematerialise the gather.
  "vocab_rows": ("tensor", "fsdp"),
  "table_embed": None,
}

RULES: Mapping[str, Rules] = {
  "default": MappingProxyType(_DEFAULT),
  # The weights whole on each device of `data` and `fsdp`.
  "data_parallel": MappingProxyType(
    {**_DEFAULT, "embed": None, "latent_rows": None, "vocab_rows": "tensor"}
  ),
}
_plan = jax.make_user_context("default")  # what is traced under one plan is not used under another


def use_plan(name: str) -> contextlib.AbstractContextManager[None]:
  """Shard by another table of `RULES`: enter it where the mesh is set.

  Raises:
    ValueError: if there is no such table.
  """
  if name not in RULES:
    raise ValueError(f"there is no sharding plan {name!r}; sharding/rules.py has {sorted(RULES)}")
  return _plan(name)


def under_this_plan[**P, R](f: Callable[P, R]) -> Callable[P, R]:
  """`f` for another thread, which would have the default plan."""
  name = _plan.value

  def inner(*args: P.args, **kwargs: P.kwargs) -> R:
    with use_plan(name):
      return f(*args, **kwargs)

  return inner


def current_rules() -> Rules:
  """The table of the plan that is in use."""
  return RULES[_plan.value]


def spec(*axes: str | None) -> jax.P:
  """Translate logical axis names to a PartitionSpec.

  Raises:
    ValueError: for an unknown name, or if two dimensions of one array use the same mesh axis.
  """
  rules = current_rules()
  unknown = [a for a in axes if a not in rules]
  if unknown:
    raise ValueError(
      f"unknown logical axes {unknown}; sharding/rules.py knows {sorted(filter(None, rules))}"
    )
  entries = [rules[a] for a in axes]
  used = [m for e in entries if e for m in ((e,) if isinstance(e, str) else e)]
  if len(used) != len(set(used)):
    raise ValueError(f"logical axes {axes} shard two dimensions over one mesh axis: {entries}")
  return jax.P(*entries)
