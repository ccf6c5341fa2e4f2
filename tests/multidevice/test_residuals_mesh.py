"""Positions of the residual stream cut over `tensor`: one device's values, in less memory."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import pytest
from collectives import collectives, traced_step
from equality import ROWS, RTOL, assert_equal, assert_lies_still, config_of, mesh_of, run

from ats_jax.planner.abstract import abstract_state
from ats_jax.planner.memory import activations
from ats_jax.sharding.mesh import on_mesh

CUT = {"tensor": 2, "shard_residuals": True}
REST = ("dots", "names", "full")
CASES = [
  ("hybrid", CUT | {"fsdp": 2}),
  ("dense", CUT),
  ("dense", CUT | {"context": 2, "fsdp": 2}),
  ("dense", CUT | {"stage": 2}),
  ("latent", CUT | {"fsdp": 2}),
  ("moe", CUT | {"expert": 2}),
  ("mod", CUT | {"context": 2}),
]


@pytest.mark.parametrize(
  ("kind", "sizes"),
  [pytest.param(*c, marks=() if i == 0 else pytest.mark.mesh) for i, c in enumerate(CASES)],
  ids=str,
)
def test_a_cut_stream_computes_what_a_whole_one_does(kind, sizes):
  many = run(kind, *sizes.items())
  # Norms and routers too, whose gradients are summed over `tensor`. With `tensor` alone layers that
  # skip tokens are 0.96e-6 of the largest element off, by rounding.
  assert_equal(many, run(kind), of_largest=RTOL / 5)
  assert_lies_still(many)


LAYERS = 3
PLAIN = {"step.accum_steps": 1, "model.num_layers": LAYERS, "model.dropout": 0.0}
STREAM = ROWS * 16 * 32  # numbers


class Traced(NamedTuple):
  sums: list[jax.P]
  text: str
  temporary: int
  kept: int


def over_tensor(spec: jax.P, dims: Iterable[int]) -> bool:
  entries = [spec.partitions[d] for d in dims]
  return any("tensor" in (e if type(e) is tuple else (e,)) for e in entries)


def sums_over_tensor(jaxpr: Any) -> Iterator[jax.P]:
  """How the products lie whose shares the devices along `tensor` have."""
  for eqn in every_equation(jaxpr):
    if eqn.primitive.name == "dot_general":
      specs = [v.aval.sharding.spec for v in eqn.invars]
      over = eqn.params["dimension_numbers"][0]
      if all(map(over_tensor, specs, over)):
        yield eqn.outvars[0].aval.sharding.spec


def every_equation(jaxpr: Any) -> Iterator[Any]:
  is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
  for eqn in jaxpr.eqns:
    yield eqn
    for param in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=is_jaxpr):
      if is_jaxpr(param):
        yield from every_equation(getattr(param, "jaxpr", param))


@functools.cache
def traced(remat: str, *, cut: bool) -> Traced:
  sizes = CUT | {"shard_residuals": cut}
  cfg, mesh = config_of("dense", sizes, PLAIN | {"step.remat": remat}), mesh_of(sizes)
  with on_mesh(cfg, mesh):
    step = traced_step(cfg, mesh)
    compiled = step.lower().compile()
    return Traced(
      list(sums_over_tensor(step.jaxpr.jaxpr)),
      compiled.as_text(),
      compiled.memory_analysis().temp_size_in_bytes,
      activations(cfg, abstract_state(cfg)),
    )


@pytest.mark.parametrize(
  ("remat", "again"), [("none", 0), pytest.param("full", 1, marks=pytest.mark.mesh)]
)
def test_a_layer_scatters_its_sums_and_gathers_its_inputs(remat, again):
  """Each product asks for a scattered sum; a CPU's XLA writes it as a sum and a slice."""
  found = traced(remat, cut=True)
  assert found.sums and all(spec.unreduced == {"tensor"} for spec in found.sums)
  every = [c for c in collectives(found.text) if c.in_loop]
  count = lambda kind: sum(a.size == STREAM for c in every if c.kind == kind for a in c.arrays)
  # Into attention and feed-forward: forward; backward again, and gradients of what leaves them.
  assert count("all-gather") == 2 + 4 + 2 * again
  assert count("all-reduce") == 2 + 2 + again
  whole = traced(remat, cut=False)
  assert whole.sums and not any(spec.unreduced for spec in whole.sums)


@pytest.mark.parametrize("remat", ["none", *(pytest.param(r, marks=pytest.mark.mesh) for r in REST)])
def test_what_is_kept_of_the_stream_shrinks(remat):
  whole, cut = (traced(remat, cut=is_cut) for is_cut in (False, True))
  # Of each layer its input; the last norm's input, and the gradient of what the loss reads.
  least = (LAYERS + 2) * STREAM * 4 // 2
  assert whole.kept - cut.kept >= least
  if remat == "full":
    assert whole.kept - cut.kept == least
  assert cut.temporary < whole.temporary
