from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

nnx.set_graph_mode(False)
nnx.set_graph_updates(False)


class Net(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Param(jax.random.normal(rngs.params(), (32, 16)))
    self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])


@jax.jit
def make_state(seed: int) -> dict:
  model = Net(nnx.Rngs(jax.random.key(seed)))
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
  _, opt_state = tx.update(jax.tree.map(jnp.sin, model), tx.init(model), model)
  return {
    "step": jnp.asarray(seed, jnp.int32),
    "model": model,
    "opt_state": opt_state,
    "ema": None,
    "key": jax.random.key(seed),
    "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
    "bf16": jnp.arange(7, dtype=jnp.bfloat16) * seed,
    "empty": jnp.zeros((0, 4)),
  }


def bits(x) -> bytes:
  return np.asarray(
    jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  ).tobytes()


def assert_same(got, want) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  ):
    assert (a.dtype, a.shape) == (b.dtype, b.shape), path
    assert bits(a) == bits(b), path


def flip_bit(path: Path, bit: int) -> None:
  data = bytearray(path.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  path.write_bytes(data)
