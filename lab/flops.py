"""FLOPs of a traced program: its matmuls, with what is inside loops multiplied out.

XLA's own `cost_analysis` counts the body of a scan once, and adds elementwise work.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

# Beginnings of the names of primitives that multiply matrices where a jaxpr does not show it.
_OPAQUE = (
  "pallas_call",
  "core_map",
  "mosaic",
  "triton",
  "ffi_call",
  "custom_partitioning",
  "dot_product_attention",
  "ragged_dot",
)


def matmul_flops(f: Callable, *args: Any) -> int:
  """FLOPs of the matmuls and convolutions in `f(*args)`, over all devices of the mesh.

  A multiply-add is two. A program that runs on every device (`shard_map`) counts once for each;
  what the compiler repeats on devices of its own accord, or finds to be unused, is not seen.

  Args:
    f: any function that jax can trace; a jitted one keeps its static arguments.
    args: arrays or `jax.ShapeDtypeStruct`s, and static arguments of a jitted `f`.

  Raises:
    ValueError: if the program hides matmuls in a kernel, or in a loop of unknown length.
  """
  traced = (f if isinstance(f, jax.stages.Wrapped) else jax.jit(f)).trace(*args)
  return _of_jaxpr(traced.jaxpr.jaxpr)


def _of_jaxpr(jaxpr: core.Jaxpr) -> int:
  return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: core.JaxprEqn) -> int:
  name, params = eqn.primitive.name, eqn.params
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    shape = _shape(eqn.invars[0])
    return 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(shape[i] for i in contracted)
  if name == "conv_general_dilated":
    kernel = _shape(eqn.invars[1])
    outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(_shape(eqn.outvars[0])) * (math.prod(kernel) // outputs)
  if name.startswith(_OPAQUE):
    raise ValueError(
      f"the FLOPs of {name} do not show in the program. Count with "
      "ops.kernels=attention=xla,grouped_matmul=xla, which compute the same."
    )
  inner = [_of_jaxpr(j) for value in params.values() for j in _jaxprs(value)]
  if name == "cond":
    return max(inner)
  if name == "while" and any(inner):
    raise ValueError(
      "a while loop with matmuls has no length that can be known. Use jax.lax.scan, or "
      "jax.lax.fori_loop with constant bounds."
    )
  times = 1
  if name == "scan":
    times = params["length"]
  elif name == "shard_map":
    times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
  return times * sum(inner)


def _shape(variable: Any) -> tuple[int, ...]:
  return variable.aval.shape


def _jaxprs(value: Any) -> list[core.Jaxpr]:
  """The jaxprs in a parameter of an equation."""
  if isinstance(value, tuple | list):
    return [jaxpr for v in value for jaxpr in _jaxprs(v)]
  inner = getattr(value, "jaxpr", value)  # of a closed one
  return [inner] if isinstance(inner, core.Jaxpr) else []
