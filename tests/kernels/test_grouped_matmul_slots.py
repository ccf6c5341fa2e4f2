"""The slots of the grouped matmul: what a program holds of calls with the same shapes."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.grouped_matmul import slots

ROWS, WIDTH, GROUPS = 256, 128, 2
CALLS = {
  "forward": lambda x, w, sizes: slots.forward(x, w, sizes),
  "input_gradient": lambda x, w, sizes: slots.input_gradient([x], [w], sizes),
}


@pytest.mark.parametrize("slot", CALLS)
def test_calls_with_the_same_shapes_share_a_program(slot):
  """Which is then lowered once."""
  x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
  w = jax.ShapeDtypeStruct((GROUPS, WIDTH, WIDTH), jnp.bfloat16)
  sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
  call = CALLS[slot]
  jaxpr = jax.make_jaxpr(lambda x, w, s: call(call(x, w, s), w, s))(x, w, sizes)
  first, second = (e.params["jaxpr"] for e in jaxpr.eqns if "jaxpr" in e.params)
  assert first is second
