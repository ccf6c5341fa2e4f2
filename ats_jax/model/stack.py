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

from ats_jax.model.unroll import run_layers, scan_runs, taken_again, unstack
from ats_jax.ops.remat import remat_policy
from ats_jax.sharding.apply import is_shared, num_shards

# `(fp8, carry, (block, first)) -> (carry, statistics)` of one super-block: which of its layers are
# multiplied in 8 bits, and the index of the first of them.
Body = Callable[[tuple[bool, ...], Any, tuple[Any, Any]], tuple[Any, Any]]


class Layers(NamedTuple):
  """Super-blocks that follow each other.

  Attributes:
    blocks: a tree whose every leaf has a leading [repeats].
    firsts: the index of the first layer of each: a range, or int32 [repeats].
    formats: of each, which of its layers are multiplied in 8 bits.
  """

  blocks: Any
  firsts: Any
  formats: Sequence[tuple[bool, ...]]


class Loop(Protocol):
  """How the layers of a segment run in a training or evaluation pass."""

  def run(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    """The carry behind the layers, and their statistics with a leading [repeats]."""
    ...


class Stack(Protocol):
  """How a decoder's segments are drawn and run; equal by value, as it is static in a program."""

  def draw(
    self, makes: Sequence[Callable[[nnx.Rngs], Any]], repeats: Sequence[int], rngs: nnx.Rngs
  ) -> list[Any]:
    """The super-blocks of each segment, stacked: every leaf has a leading [repeats].

    Args:
      makes: give one super-block of each segment.
      repeats: how many each segment has.
      rngs: gives all keys.
    """
    ...

  def join(self, batch: Any) -> Any | None:
    """The micro-batches of a step as the rows of one pass; None = each takes a pass of its own.

    Args:
      batch: a tree of arrays [micro, batch, ...].
    """
    ...

  def run(
    self,
    body_of: Callable[[Any, jax.Array | None], Body],
    segments: Sequence[Layers],
    carry: Any,
    beside: Any,
    key: jax.Array | None,
    *,
    training: bool,
  ) -> tuple[Any, list[Any]]:
    """Run all segments.

    Args:
      body_of: what a super-block computes, given `beside` and `key` of the rows at hand.
      segments: from the bottom up.
      carry: a tree of arrays [rows, ...] that go through the layers.
      beside: a tree of arrays [rows, ...] that every layer is told about them.
      key: of a micro-batch, or of all that `join` joined.
      training: the rows are those of a training step.

    Returns:
      The carry behind the last layer, and the statistics of each segment, [repeats, ...].
    """
    ...

  def scan(
    self, body: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]], blocks: Any, carry: Any, xs: Any
  ) -> tuple[Any, Any]:
    """`jax.lax.scan` over the super-blocks of a segment, for generation: a token is no pipeline.

    Args:
      body: `(carry, (block, x)) -> (carry, y)`.
      blocks: as in `Layers`.
      carry: as in `jax.lax.scan`.
      xs: what else each super-block is given, with a leading [repeats].
    """
    ...

  def facts(self) -> dict[str, str]:
    """What the log of a run says of it, by name."""
    ...


@dataclasses.dataclass(frozen=True)
class Remat:
  """What the backward pass of a super-block computes again.

  Attributes:
    policy: `step.remat`.
    keep_gathered: `mesh.keep_gathered`.
    one_barrier: all arguments get a barrier, if one does: jax takes no tree of them where a policy
      around the layers keeps some results.
  """

  policy: str
  keep_gathered: bool
  one_barrier: bool

  def gathers_again(self) -> bool:
    """Whether the backward pass gathers the weights of a layer that it computes again."""
    return num_shards("embed") > 1 and not self.keep_gathered and self.policy != "none"

  def of(self, super_block: Callable, barriers: Any) -> Callable:
    """`super_block`, checkpointed.

    Args:
      super_block: to be called once for each layer.
      barriers: which arguments get one against CSE: a prefix of their tree. (jax accepts that, its
        type annotation does not.) False = it is called in a loop, which needs none.
    """
    if self.policy == "none":
      return super_block
    barriers = True if barriers and self.one_barrier else barriers
    return jax.checkpoint(super_block, policy=remat_policy(self.policy), prevent_cse=barriers)

  def barriers(self) -> Any:
    """Those of `(carry, (block, first))` outside of a loop.

    Only gathered weights get one, so that they are not kept; others are resident anyway.
    """
    return True, (self.gathers_again(), True)


@dataclasses.dataclass(frozen=True)
class Scan(Loop):
  """A loop over super-blocks, `unroll` of them an iteration."""

  remat: Remat
  unroll: int

  @override
  def run(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    barriers = False if self.unroll == 1 else self.remat.barriers()
    bodies = _bodies(lambda fp8: self.remat.of(functools.partial(body, fp8), barriers), layers)
    return scan_runs(bodies, carry, (layers.blocks, jnp.array(layers.firsts)), self.unroll)


@dataclasses.dataclass(frozen=True)
class Unrolled(Loop):
  """Super-blocks one after the other in the program."""

  remat: Remat

  @override
  def run(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    if self.remat.gathers_again():
      return self._from_stack(body, layers, carry)
    barriers = self.remat.barriers()
    bodies = _bodies(lambda fp8: self.remat.of(functools.partial(body, fp8), barriers), layers)
    xs = zip(unstack(layers.blocks), layers.firsts, strict=True)
    return run_layers(bodies, carry, xs, in_order=is_shared())

  def _from_stack(self, body: Body, layers: Layers, carry: Any) -> tuple[Any, Any]:
    """The backward pass takes a layer from the stack, which is there anyway, and keeps no copy."""

    def of_layer(fp8, blocks, carry, layer):
      block, index, first = layer
      return body(fp8, carry, (taken_again(block, blocks, index), first))

    barriers = False, True, (False, True, True)  # the index has that of the weights
    bodies = _bodies(lambda fp8: self.remat.of(functools.partial(of_layer, fp8), barriers), layers)
    bodies = [functools.partial(body, layers.blocks) for body in bodies]
    xs = zip(unstack(layers.blocks), range(len(bodies)), layers.firsts, strict=True)
    return run_layers(bodies, carry, xs, in_order=is_shared())


def _bodies(of_formats: Callable[[tuple[bool, ...]], Callable], layers: Layers) -> list[Callable]:
  """A function for each super-block: one for each choice of formats, which is traced once."""
  cached = functools.cache(of_formats)
  return [cached(fp8) for fp8 in layers.formats]


@dataclasses.dataclass(frozen=True)
class InOrder(Stack):
  """Each device runs all segments.

  Attributes:
    loops: of each segment.
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
    beside: Any,
    key: jax.Array | None,
    *,
    training: bool,
  ) -> tuple[Any, list[Any]]:
    del training
    assert num_shards("layers") == 1, "the mesh has stages: choose by `model.numerics.stack_of`"
    stats = []
    for loop, layers in zip(self.loops, segments, strict=True):
      carry, of_segment = loop.run(body_of(beside, key), layers, carry)
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
