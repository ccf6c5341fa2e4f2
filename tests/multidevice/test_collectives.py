"""Collectives of the compiled train step, counted.

XLA on a CPU has no pass that makes reduce-scatters: it sums whole gradients (one all-reduce for all
of a block) and slices the results. So one array of an all-reduce is counted as a reduce-scatter.
The gradient of the head is scattered by our own code, as on any device.
"""

import functools
from collections import Counter

import pytest
from collectives import Collective, collectives, compiled_step
from helpers import make_test_mesh, tiny_config

from ats_jax.sharding.mesh import on_mesh

LAYERS, FSDP = 3, 4
BASE = {"orchestrator.mode": "off", "model.num_layers": LAYERS, "step.loss_chunk_tokens": 128}
SMALL = 256  # bytes: metrics and norms
# Of one layer, whole: q, k and v, o; gate and up, down. By elements, as XLA chooses the shapes.
MATRICES = Counter({32 * 32: 2, 32 * 16: 2, 32 * 64: 3})
TABLE = 64 * 32  # elements of the lookup table, and of the head; also of gate, up and down
TOKENS = 8 * 16  # of the batch
ROWS = TOKENS // FSDP  # of them on a device


@functools.cache
def found(**changes: object) -> list[Collective]:
  dotted = {name.replace("__", "."): value for name, value in changes.items()}
  cfg, mesh = tiny_config(BASE | dotted), make_test_mesh(1, FSDP, 1)
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  return [c for c in every if c.bytes > SMALL]


def sizes(every: list[Collective], kind: str, *, in_loop: bool) -> Counter[int]:
  """How many arrays of each number of elements the collectives of a kind give."""
  chosen = [c for c in every if c.kind == kind and bool(c.in_loop) == in_loop]
  return Counter(a.size for c in chosen for a in c.arrays if a.bytes > SMALL)


def times(one: Counter[int], number: int) -> Counter[int]:
  return Counter({size: number * count for size, count in one.items()})


def test_a_scanned_stack_gathers_each_weight_twice_and_scatters_it_once():
  every = found(step__remat="none")
  assert sizes(every, "all-gather", in_loop=True) == times(MATRICES, 2)
  assert sizes(every, "all-reduce", in_loop=True) == MATRICES
  assert not sizes(every, "all-reduce", in_loop=False)


def test_a_head_is_gathered_once_and_scattered_and_a_table_never():
  every = found(step__remat="none")
  assert sizes(every, "all-gather", in_loop=False) == {TABLE: 1, TOKENS: 1}
  assert sizes(every, "reduce-scatter", in_loop=False) == {TABLE // FSDP: 1}
  # Of a device's rows, the parts of the width that others looked up; and their gradients.
  assert sizes(every, "all-to-all", in_loop=False) == {ROWS * 32 // FSDP: 2 * FSDP}


@pytest.mark.mesh
def test_an_unrolled_stack_gathers_a_weight_again_where_it_is_not_kept():
  every, gathers = found(step__remat="full", step__scan_unroll=LAYERS), 2
  ends = Counter([TABLE, TOKENS])
  assert sizes(every, "all-gather", in_loop=False) == times(MATRICES, gathers * LAYERS) + ends
  assert sizes(every, "all-reduce", in_loop=False) == times(MATRICES, LAYERS)
  assert not any(c.in_loop for c in every)


@pytest.mark.mesh
def test_an_unrolled_stack_that_keeps_what_it_gathered_gathers_a_weight_once():
  unrolled = {"step__remat": "dots", "step__scan_unroll": LAYERS}
  every = found(mesh__fsdp=FSDP, mesh__keep_gathered=True, **unrolled)
  ends = Counter([TABLE, TOKENS])
  assert sizes(every, "all-gather", in_loop=False) == times(MATRICES, LAYERS) + ends
  assert sizes(every, "all-reduce", in_loop=False) == times(MATRICES, LAYERS)


@pytest.mark.parametrize(
  "changes",
  [
    {"step__remat": "none"},
    pytest.param(
      {"moe__num_experts": 4, "moe__d_ff": 32, "step__accum_steps": 2, "step__remat": "full"},
      marks=pytest.mark.mesh,
    ),
  ],
  ids=["dense", "experts"],
)
def test_no_stack_of_layers_is_gathered(changes):
  gathered = [a for c in found(**changes) if c.kind == "all-gather" for a in c.arrays]
  assert gathered
  largest = max(TABLE, 4 * 32 * 32) if "moe__num_experts" in changes else TABLE
  assert max(a.size for a in gathered) == largest
  assert not any(a.shape[0] == LAYERS for a in gathered)


@pytest.mark.mesh
def test_with_the_weights_whole_new_ones_are_gathered_once_an_update():
  every = found(mesh__zero=2, step__accum_steps=2)
  stacks = Counter({size * LAYERS: number for size, number in MATRICES.items()})
  assert sizes(every, "all-gather", in_loop=False) == stacks + Counter({TABLE: 2})
  assert not sizes(every, "all-gather", in_loop=True)
  assert sizes(every, "all-reduce", in_loop=True) == MATRICES + Counter({TABLE: 2})
