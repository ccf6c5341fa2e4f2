"""The stack of a decoder whose layers are divided over pipeline stages (`sharding.pipeline`)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.model.param import Buffer, is_variable
from ats_jax.model.stack import Body, Layers, Loop, Stack
from ats_jax.ops.remat import remat_policy
from ats_jax.sharding.apply import reshard
from ats_jax.sharding.pipeline import (
  describe_pipeline,
  join_micro_batches,
  layer_at,
  most_micro_batches,
  num_stages,
  pipeline,
)


@dataclasses.dataclass(frozen=True)
class Pipeline(Stack):
  """Runs each segment as one round of a pipeline, its layers divided over the stages of the mesh.

  Attributes:
    loop: how a stage runs its layers of one round; all rounds are alike.
    num_layers: the number of layers in all stages and rounds.
    micro_batches: the number of micro-batches of a training step.
    rounds: how often a micro-batch goes through all stages.
    remat: `step.remat_stages`.
  """

  loop: Loop
  num_layers: int
  micro_batches: int
  rounds: int
  remat: str

  @override
  def draw(
    self, makes: Sequence[Callable[[nnx.Rngs], Any]], repeats: Sequence[int], rngs: nnx.Rngs
  ) -> list[Any]:
    # The rounds take the keys of one stack, and each stage draws its own weights.
    number, *others = repeats
    assert set(others) <= {number}
    all_keys = rngs.split(number * len(repeats))
    part = lambda n: jax.tree.map(lambda a: a[n * number : (n + 1) * number], all_keys)
    keys = [part(n) for n in range(len(repeats))]
    return [_draw_stages(make, of_round) for make, of_round in zip(makes, keys, strict=True)]

  @override
  def join(self, batch: Any) -> Any:
    return jax.tree.map(join_micro_batches, batch)

  @override
  def run(
    self,
    body_of: Callable[[Any, jax.Array | None], Body],
    segments: Sequence[Layers],
    carry: Any,
    side_inputs: Any,
    key: jax.Array | None,
    *,
    training: bool,
  ) -> tuple[Any, list[Any]]:
    # All stages have the same formats in the same places (`check_stages`).
    formats = segments[0].formats

    def stage(layers, carry, side_inputs, key):
      blocks, firsts = layers
      return self.loop.run(
        body_of(side_inputs, key), Layers(blocks, firsts, formats[: len(firsts)]), carry
      )

    rows = len(jax.tree.leaves(carry)[0])
    rounds = [(layers.blocks, jnp.array(layers.firsts)) for layers in segments]
    micro = self.micro_batches if training else most_micro_batches(rows)
    policy = remat_policy(self.remat)
    return pipeline(stage, rounds, carry, side_inputs, key, micro=micro, policy=policy)

  @override
  def scan(
    self, body: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]], blocks: Any, carry: Any, xs: Any
  ) -> tuple[Any, Any]:
    # The stage that holds a layer sends its weights to all stages.
    def of_layer(blocks, carry, index_and_x):
      index, x = index_and_x
      return body(carry, (layer_at(blocks, index), x))

    repeats = len(jax.tree.leaves(blocks)[0])
    return jax.lax.scan(functools.partial(of_layer, blocks), carry, (jnp.arange(repeats), xs))

  @override
  def facts(self) -> dict[str, str]:
    return {
      "pipeline": describe_pipeline(self.num_layers, self.micro_batches, num_stages(), self.rounds)
    }


def _draw_stages(make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> Any:
  blocks = jax.vmap(make)(jax.tree.map(lambda a: reshard(a, "layers"), rngs))
  # Buffers are small, and the step sets those of all layers at a time.
  gathered = lambda v: jax.tree.map(lambda a: reshard(a, None, *v.axes), v)
  of_variable = lambda v: gathered(v) if isinstance(v, Buffer) else v
  return jax.tree.map(of_variable, blocks, is_leaf=is_variable)
