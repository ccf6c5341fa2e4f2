"""How a device runs the layers of a decoder: in a loop, or one after the other.

The decoder says what a super-block computes, a `Stack` how the super-blocks follow each other.
`model.numerics.stack_of` chooses one for a run. `InOrder` is that of a device which has all layers;
`model.pipelined` has that of a pipeline. The layers of a segment run by a `Loop`: `Scan` or
`Unrolled`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, override

import jax
import jax.numpy as jnp
from flax import nnx

from ats_jax.model.unroll import reread_layer, run_layers, scan_runs, unstack
from ats_jax.ops.remat import remat_policy
from ats_jax.sharding.apply import has_several_devices, num_shards

# `(fp8, carry, (block, first)) -> (carry, statistics)` of one super-block: which of its layers are
# multiplied in 8 bits, and the index of the first of them.
Body = Callable[[tuple[bool, ...], Any, tuple[Any, Any]], tuple[Any, Any]]


class Layers(NamedTuple):
  """Consecutive super-blocks of one segment.

  Attributes:
    blocks: a tree whose every leaf has a leading [repeats].
    firsts: the index of the first layer of each super-block: a range, or int32 [repeats].
    formats: for each super-block, which of its layers multiply in 8 bits.
  """

  blocks: Any
  firsts: Any
  formats: Sequence[tuple[bool, ...]]


class Loop(Protocol):
  """How the layers of a segment run in a training or evaluation pass."""

  def run(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    """Return the carry after the layers, and their statistics with a leading [repeats]."""
    ...


class Stack(Protocol):
  """How a decoder's segments are initialised and run. Hashed by value: it is static under jit."""

  def draw(
    self, makes: Sequence[Callable[[nnx.Rngs], Any]], repeats: Sequence[int], rngs: nnx.Rngs
  ) -> list[Any]:
    """Draw the super-blocks of each segment, stacked: every leaf has a leading [repeats].

    Args:
      makes: for each segment, a function that draws one super-block.
      repeats: the number of super-blocks of each segment.
      rngs: the source of all keys.
    """
    ...

  def join(self, batch: Any) -> Any | None:
    """Join the micro-batches of a step into the rows of one pass; None = one pass for each.

    Args:
      batch: a tree of arrays [micro, batch, ...].
    """
    ...

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
    """Run all segments.

    Args:
      body_of: maps `side_inputs` and `key` of some rows to the function of a super-block.
      segments: the segments from the bottom up.
      carry: a tree of arrays [rows, ...] that go through the layers.
      side_inputs: a tree of arrays [rows, ...] that every layer reads and none changes.
      key: the key of the micro-batch, or of all micro-batches that `join` joined.
      training: whether this is a training step.

    Returns:
      The carry after the last layer, and the statistics of each segment, [repeats, ...].
    """
    ...

  def scan(
    self, body: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]], blocks: Any, carry: Any, xs: Any
  ) -> tuple[Any, Any]:
    """Run `jax.lax.scan` over the super-blocks of a segment; for generation, without a pipeline.

    Args:
      body: `(carry, (block, x)) -> (carry, y)`.
      blocks: a tree whose every leaf has a leading [repeats].
      carry: the first carry.
      xs: further inputs of each super-block, with a leading [repeats].
    """
    ...

  def facts(self) -> dict[str, str]:
    """Describe the stack for the log of a run, by name."""
    ...


@dataclasses.dataclass(frozen=True)
class Remat:
  """Rematerialisation: what the backward pass of a super-block computes again.

  Attributes:
    policy: the value of `step.remat`.
    keep_gathered: the value of `mesh.keep_gathered`.
    decodes: whether weights are stored as codes, of which the backward pass makes them again.
    one_barrier: if one argument needs a barrier, give one to all: jax accepts no tree of barriers
      where a checkpoint policy around the layers keeps some results.
  """

  policy: str
  keep_gathered: bool
  decodes: bool
  one_barrier: bool

  def makes_again(self) -> bool:
    """Whether the backward pass gathers or decodes weights again to recompute a layer."""
    gathers = num_shards("embed") > 1 and not self.keep_gathered
    return (gathers or self.decodes) and self.policy != "none"

  def checkpoint(self, super_block: Callable, barriers: Any) -> Callable:
    """Wrap the function of a super-block in `jax.checkpoint`.

    Args:
      super_block: the function, called once for each super-block.
      barriers: which arguments get a barrier against CSE, as a prefix of their tree (jax accepts
        that, its type annotation does not). False = none, for a call inside a loop.
    """
    if self.policy == "none":
      return super_block
    barriers = True if barriers and self.one_barrier else barriers
    return jax.checkpoint(super_block, policy=remat_policy(self.policy), prevent_cse=barriers)

  def barriers(self) -> Any:
    """The barriers of `(carry, (block, first))` for a call outside of a loop.

    Only weights that are made again get one, so that they are not kept; others are resident anyway.
    """
    return True, (self.makes_again(), True)


@dataclasses.dataclass(frozen=True)
class Scan(Loop):
  """Runs super-blocks in a loop, `unroll` of them in each iteration."""

  remat: Remat
  unroll: int

  @override
  def run(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    barriers = False if self.unroll == 1 else self.remat.barriers()
    bodies = _bodies(
      lambda fp8: self.remat.checkpoint(functools.partial(body, fp8), barriers), layers
    )
    return scan_runs(bodies, carry, (layers.blocks, jnp.array(layers.firsts)), self.unroll)


@dataclasses.dataclass(frozen=True)
class Unrolled(Loop):
  """Runs super-blocks one after the other, without a loop."""

  remat: Remat

  @override
  def run(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    if self.remat.makes_again():
      return self._from_stack(body, layers, carry)
    barriers = self.remat.barriers()
    bodies = _bodies(
      lambda fp8: self.remat.checkpoint(functools.partial(body, fp8), barriers), layers
    )
    xs = zip(unstack(layers.blocks), layers.firsts, strict=True)
    return run_layers(bodies, carry, xs, in_order=has_several_devices())

  def _from_stack(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    """Run layers so that the backward pass reads them from the stack instead of keeping copies."""

    def of_layer(fp8, blocks, carry, layer):
      block, index, first = layer
      if self.remat.decodes:
        # Or XLA would copy the codes of all layers from the stack before the first layer runs.
        index, carry = jax.lax.optimization_barrier((index, carry))
      return body(fp8, carry, (reread_layer(block, blocks, index), first))

    barriers = False, True, (False, True, True)  # the index has that of the weights
    bodies = _bodies(
      lambda fp8: self.remat.checkpoint(functools.partial(of_layer, fp8), barriers), layers
    )
    bodies = [functools.partial(body, layers.blocks) for body in bodies]
    xs = zip(unstack(layers.blocks), range(len(bodies)), layers.firsts, strict=True)
    return run_layers(bodies, carry, xs, in_order=has_several_devices())


def _bodies(of_formats: Callable[[tuple[bool, ...]], Callable], layers: Layers) -> list[Callable]:
  """Make the function of each super-block; those with equal formats share one, traced once."""
  cached = functools.cache(of_formats)
  return [cached(fp8) for fp8 in layers.formats]


@dataclasses.dataclass(frozen=True)
class InOrder(Stack):
  """Runs all segments on each device.

  Attributes:
    loops: how each segment runs.
  """

  loops: tuple[Loop, ...]

  @override
  def draw(
    self, makes: Sequence[Callable[[nnx.Rngs], Any]], repeats: Sequence[int], rngs: nnx.Rngs
  ) -> list[Any]:
    keys = [rngs.split(number) for number in repeats]
    return [jax.vmap(make)(of_segment) for make, of_segment in zip(makes, keys, strict=True)]

  @override
  def join(self, batch: Any) -> None:
    del batch

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
    del training
    assert num_shards("layers") == 1, "the mesh has stages: choose by `model.numerics.stack_of`"
    stats = []
    for loop, layers in zip(self.loops, segments, strict=True):
      carry, of_segment = loop.run(body_of(side_inputs, key), layers, carry)
      stats.append(of_segment)
    return carry, stats

  @override
  def scan(
    self, body: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]], blocks: Any, carry: Any, xs: Any
  ) -> tuple[Any, Any]:
    return jax.lax.scan(body, carry, (blocks, xs))

  @override
  def facts(self) -> dict[str, str]:
    return {}
