"""Where logical axes (what a dimension means) meet mesh axes (where it lives): a table a plan."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import jax

# Mesh axes, outermost first. Neighbouring devices share the last axis, which talks the most.
MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")

# None = not sharded. A tuple shards one dimension over several mesh axes.
Rules = Mapping[str | None, str | tuple[str, ...] | None]
# Along these the devices have other tokens, and parts of the same weights (ZeRO). Along `data` they
# have other tokens, and copies.
SHARDS = ("fsdp", "expert", "context")
_DEFAULT: Rules = {
  None: None,
  # activations
  "batch": ("data", "fsdp", "expert"),
  "micro": "stage",  # micro-batches on their way into and out of a pipeline
  "rows": ("stage", "data", "fsdp", "expert"),  # of these micro-batches, before and behind it
  "seq": "context",  # positions inside a sub-layer
  "residual_seq": "context",  # positions of the residual stream, between sub-layers
  "act_embed": None,
  "heads": "tensor",
  "kv_heads": "tensor",
  "heads_of_rows": ("tensor", "context"),  # where attention has whole rows of some heads
  "head_dim": None,
  "latent": None,  # that heads are made of
  "ff": "tensor",
  "vocab": "tensor",
  "choice": None,  # of a token among experts
  # parameters: `embed` is the d_model side of a matrix
  "layers": "stage",  # of a stack
  "replica": "data",  # copies of the weights, where each has something of its own
  "embed": SHARDS,
  "latent_rows": SHARDS,  # the latent's side of a matrix, like `embed`
  "norm": None,
  "experts": "expert",
  "stored_experts": "expert",  # of a stack, and the d_model side of its matrices: see `Plan`
  "expert_embed": ("fsdp", "context"),
  "router": None,  # experts as columns of the router
}

_DATA_PARALLEL: Rules = {**_DEFAULT, "embed": None, "latent_rows": None, "expert_embed": None}

RULES: Mapping[str, Rules] = {
  "default": MappingProxyType(_DEFAULT),  # ZeRO-3
  # The weights whole along SHARDS, but experts along `expert`.
  "data_parallel": MappingProxyType(_DATA_PARALLEL),
  # Likewise, but not what else is as large as they are: see KEPT.
  "zero_1": MappingProxyType(_DATA_PARALLEL),
  "zero_2": MappingProxyType(_DATA_PARALLEL),
}
# What is sharded by the table of another plan than the weights (Rajbhandari et al. 2020,
# arXiv:1910.02054, section 5): stage 1 the optimizer's state, stage 2 the gradients too.
Part = Literal["weights", "gradients", "moments"]
PARTS: tuple[Part, ...] = get_args(Part)
KEPT: Mapping[str, Mapping[Part, str]] = {
  "zero_1": {"moments": "default"},
  "zero_2": {"moments": "default", "gradients": "default"},
}
ZERO = {1: "zero_1", 2: "zero_2", 3: "default"}  # plans by `mesh.zero`


class Plan(NamedTuple):
  """What is in use: a table of logical axes, and how it differs from that of RULES.

  Attributes:
    name: of a table of RULES.
    whole_vocabulary: the vocabulary is not cut: the mesh does not divide it, and no row is padded.
    whole_rows: the positions of a row are not cut.
    cut_residuals: positions of the residual stream are cut by the axis of widths too.
    whole_matrices: what cuts the matrices of experts deals out whole ones instead.
    hosts: that the mesh axis of experts is spread over, in blocks of neighbours of one size. A fact
      of the mesh, like its sizes.
    copies: shards of weights and of their gradients, and what attention swaps along a row, are
      sent from device to device, as copies. Not an argument of layers: the same layers train with
      copies and generate without (`whole_rows`).
    own_rows: a batch is the rows of one replica, and no other replica is met. Not an argument: it
      holds for all that a gradient traces (`sharding.replicas`).
  """

  name: str = "default"
  whole_vocabulary: bool = False
  whole_rows: bool = False
  cut_residuals: bool = False
  whole_matrices: bool = False
  hosts: int = 1
  copies: bool = False
  own_rows: bool = False


_plan = jax.make_user_context(Plan())  # what is traced under one plan is not used under another


def use_plan(name: str, **others: bool | int) -> contextlib.AbstractContextManager[None]:
  """Shard by another table of `RULES`: enter it where the mesh is set.

  Args:
    name: of the table.
    others: fields of `Plan`.

  Raises:
    ValueError: if there is no such table.
  """
  if name not in RULES:
    raise ValueError(f"there is no sharding plan {name!r}; sharding/rules.py has {sorted(RULES)}")
  return _plan(Plan(name)._replace(**others))


def whole_rows() -> contextlib.AbstractContextManager[None]:
  """The plan in use without a cut along the positions of a row: a token by itself has none.

  And without copies of shards: what generates has no options of XLA, which make them.
  """
  return _plan(current_plan()._replace(whole_rows=True, copies=False))


def own_rows() -> contextlib.AbstractContextManager[None]:
  """The plan in use for one replica by itself (`sharding.replicas`)."""
  return _plan(current_plan()._replace(own_rows=True))


def under_this_plan[**P, R](f: Callable[P, R]) -> Callable[P, R]:
  """`f` for another thread, which would have the default plan."""
  plan = current_plan()

  def inner(*args: P.args, **kwargs: P.kwargs) -> R:
    with _plan(plan):
      return f(*args, **kwargs)

  return inner


def current_plan() -> Plan:
  """The plan that is in use."""
  return _plan.value


def current_rules(part: Part = "weights") -> Rules:
  """The table of the plan that is in use, for weights and activations or another part."""
  plan = current_plan()
  return _table(plan._replace(name=KEPT.get(plan.name, {}).get(part, plan.name)))


@functools.cache
def _table(plan: Plan) -> Rules:
  rules = dict(RULES[plan.name])
  if plan.whole_rows:
    rules |= {"seq": None, "residual_seq": None, "heads_of_rows": rules["heads"]}
  elif plan.cut_residuals:
    rules["residual_seq"] = ("context", "tensor")
  if plan.whole_vocabulary:
    rules["vocab"] = None
  if plan.whole_matrices and rules["expert_embed"]:
    rules |= {"stored_experts": ("expert", "fsdp", "context"), "expert_embed": None}
  if plan.own_rows:
    rules |= {axis: _without(rules[axis], rules["replica"]) for axis in ("batch", "rows")}
  return MappingProxyType(rules)


def _without(names, name):
  return tuple(n for n in names if n != name)


def spec(*axes: str | None, part: Part = "weights") -> jax.P:
  """Translate logical axis names to a PartitionSpec.

  Args:
    axes: of each dimension; None = not sharded.
    part: what it is of: weights and activations, or what a plan may shard otherwise.

  Raises:
    ValueError: for an unknown name, or if two dimensions of one array use the same mesh axis.
  """
  rules = current_rules(part)
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
