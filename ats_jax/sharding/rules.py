"""Sharding rules: one table for each plan, from logical axes to mesh axes."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import jax

# Mesh axes, outermost first. Neighbouring devices share the last axis, which talks the most.
MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")

# None = not sharded. A tuple shards one dimension over several mesh axes.
ShardingRules = Mapping[str | None, str | tuple[str, ...] | None]
# Devices along these axes have different tokens and different shards of the weights (ZeRO). Along
# `data` they have different tokens and copies of the weights.
ZERO_AXES = ("fsdp", "expert", "context")
_DEFAULT: ShardingRules = {
  None: None,
  # activations
  "batch": ("data", "fsdp", "expert"),
  "micro": "stage",  # micro-batches on their way into and out of a pipeline
  "rows": ("stage", "data", "fsdp", "expert"),  # of these micro-batches, before and behind it
  "seq": "context",  # positions of a row
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
  "embed": ZERO_AXES,
  "latent_rows": ZERO_AXES,  # the latent's side of a matrix, like `embed`
  "norm": None,
  "experts": "expert",
  "stored_experts": "expert",  # of a stack, and the d_model side of its matrices: see `Plan`
  "expert_embed": ("fsdp", "context"),
  "router": None,  # experts as columns of the router
  "rank": None,  # of an adapter
  "rating": None,  # the one row of a head that rates
}

_DATA_PARALLEL: ShardingRules = {
  **_DEFAULT,
  "embed": None,
  "latent_rows": None,
  "expert_embed": None,
}

RULES: Mapping[str, ShardingRules] = {
  "default": MappingProxyType(_DEFAULT),  # ZeRO-3
  # The weights whole along ZERO_AXES, but experts along `expert`.
  "data_parallel": MappingProxyType(_DATA_PARALLEL),
  # Likewise, but not what else is as large as they are: see PART_PLANS.
  "zero_1": MappingProxyType(_DATA_PARALLEL),
  "zero_2": MappingProxyType(_DATA_PARALLEL),
}
# What is sharded by the table of another plan than the weights (Rajbhandari et al. 2020,
# arXiv:1910.02054, section 5): stage 1 the optimizer's state, stage 2 the gradients too.
StatePart = Literal["weights", "gradients", "moments"]
STATE_PARTS: tuple[StatePart, ...] = get_args(StatePart)
PART_PLANS: Mapping[str, Mapping[StatePart, str]] = {
  "zero_1": {"moments": "default"},
  "zero_2": {"moments": "default", "gradients": "default"},
}
PLAN_OF_ZERO_STAGE = {1: "zero_1", 2: "zero_2", 3: "default"}  # plans by `mesh.zero`


class Plan(NamedTuple):
  """The sharding plan in use: a table of RULES and the changes to it.

  Attributes:
    name: the name of a table in RULES.
    whole_vocabulary: the vocabulary is not sharded, as the mesh does not divide it.
    whole_rows: the positions of a row are not sharded.
    whole_batch: every device has all rows.
    whole_matrices: the axes that shard the matrices of experts distribute whole experts instead.
    hosts: the number of hosts that the mesh axis of experts is spread over, in blocks of neighbours
      of one size. A fact of the mesh, like its sizes.
    copy_engines: weights, their gradients and what attention swaps along a row are sent between
      devices as copies (`mesh.copy_engines`). It is not an argument of layers because the same
      layers train with copies and generate without (`whole_rows`).
    isolated_replica: the traced function sees the rows of one replica only. It is not an argument
      because it holds for all that a gradient traces (`sharding.replicas`).
  """

  name: str = "default"
  whole_vocabulary: bool = False
  whole_rows: bool = False
  whole_batch: bool = False
  whole_matrices: bool = False
  hosts: int = 1
  copy_engines: bool = False
  isolated_replica: bool = False


_plan = jax.make_user_context(Plan())  # what is traced under one plan is not used under another


def use_plan(name: str, **others: bool | int) -> contextlib.AbstractContextManager[None]:
  """Use a table of `RULES`; a context manager, to be entered where the mesh is set.

  Args:
    name: the name of the table.
    others: further fields of `Plan`.

  Raises:
    ValueError: if there is no such table.
  """
  if name not in RULES:
    raise ValueError(f"there is no sharding plan {name!r}; sharding/rules.py has {sorted(RULES)}")
  return _plan(Plan(name)._replace(**others))


def whole_rows() -> contextlib.AbstractContextManager[None]:
  """Use the current plan without sharding along the positions of a row, for generation.

  It also turns off `copy_engines`, as programs for generation lack the XLA options that they need.
  """
  return _plan(current_plan()._replace(whole_rows=True, copy_engines=False))


def for_serving() -> contextlib.AbstractContextManager[None]:
  """Use the current plan for the engine, which reads few rows at a time.

  Every device has all rows, and all weights but for its shares along `tensor` and of the experts.
  """
  plan = current_plan()._replace(name="data_parallel", whole_rows=True, whole_batch=True)
  return _plan(plan._replace(copy_engines=False))


def isolated_replica() -> contextlib.AbstractContextManager[None]:
  """Use the current plan for one replica that is traced by itself (`sharding.replicas`)."""
  return _plan(current_plan()._replace(isolated_replica=True))


def under_this_plan[**P, R](f: Callable[P, R]) -> Callable[P, R]:
  """Wrap `f` to use the current plan in any thread; other threads start with the default plan."""
  plan = current_plan()

  def inner(*args: P.args, **kwargs: P.kwargs) -> R:
    with _plan(plan):
      return f(*args, **kwargs)

  return inner


def current_plan() -> Plan:
  """The plan in use."""
  return _plan.value


def current_rules(part: StatePart = "weights") -> ShardingRules:
  """The sharding rules in use for `part` of the state; activations go by those of the weights."""
  plan = current_plan()
  return _rules_of(plan._replace(name=PART_PLANS.get(plan.name, {}).get(part, plan.name)))


@functools.cache
def _rules_of(plan: Plan) -> ShardingRules:
  rules = dict(RULES[plan.name])
  if plan.whole_rows:
    rules |= {"seq": None, "heads_of_rows": rules["heads"]}
  if plan.whole_vocabulary:
    rules["vocab"] = None
  if plan.whole_batch:
    rules |= {"batch": None, "rows": None}
  if plan.whole_matrices and rules["expert_embed"]:
    rules |= {"stored_experts": ("expert", "fsdp", "context"), "expert_embed": None}
  if plan.isolated_replica:
    rules |= {axis: _without(rules[axis], rules["replica"]) for axis in ("batch", "rows")}
  return MappingProxyType(rules)


def _without(names, name):
  return tuple(n for n in names if n != name)


def spec(*axes: str | None, part: StatePart = "weights") -> jax.P:
  """Translate logical axis names to a PartitionSpec.

  Args:
    axes: the logical axis of each dimension; None = not sharded.
    part: the part of the state that the array belongs to; activations go with the weights.

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
