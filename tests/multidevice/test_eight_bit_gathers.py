"""Weights that are multiplied in 8 bits cross the links in 8 bits, and nothing else changes."""

from collections import Counter

import numpy as np
import pytest
from collectives import collectives, compiled_step
from equality import CFG, ROWS, mesh_of
from helpers import micro_batches, random_rows, tiny_config

from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.program import make_program

LAYERS = 3
EIGHT = CFG | {
  "precision.fp8": True,
  "precision.fp8_keep_first": 0,
  "precision.fp8_keep_last": 1,
  "model.num_layers": LAYERS,
  "model.num_kv_heads": 4,
  "data.seq_len": 32,
  "step.accum_steps": 1,
}
MATRICES = 7  # of a layer


def losses(sizes, **changes):
  dotted = {name.replace("__", "."): value for name, value in changes.items()}
  cfg, mesh = (
    tiny_config(EIGHT | {f"mesh.{a}": n for a, n in sizes.items()} | dotted),
    mesh_of(sizes),
  )
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    state, found = program.init(), []
    batch = to_global(micro_batches(random_rows(cfg, ROWS, seed=0), 1), mesh)
    for _ in range(3):
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      found.append(float(metrics["train/loss"]))
    return found


@pytest.mark.mesh
def test_operands_are_those_of_weights_that_were_whole():
  """With mesh.zero=2 no weight is gathered for a matmul."""
  sizes = {"fsdp": 2, "tensor": 2}
  found, want = (losses(sizes, mesh__zero=zero) for zero in (3, 2))
  np.testing.assert_allclose(found, want, rtol=2e-6)
  assert found[2] < found[0]


def test_matrices_are_gathered_as_bytes():
  cfg = tiny_config(EIGHT | {"mesh.fsdp": 2})
  mesh = mesh_of({"fsdp": 2})
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  gathered = [a for c in every if c.kind == "all-gather" for a in c.arrays if len(a.shape) > 1]
  number = Counter(a.dtype for a in gathered if a.dtype != "s32")  # those are tokens
  # Of a loop over layers in 8 bits, of the last layer for both passes, and of the head.
  assert number == {"u8": 2 * MATRICES, "f32": 2 * MATRICES + 1}


@pytest.mark.mesh
def test_matrices_that_are_kept_are_gathered_once():
  unrolled = {"step.remat": "names", "step.scan_unroll": LAYERS}
  cfg = tiny_config(EIGHT | unrolled | {"mesh.fsdp": 2, "mesh.keep_gathered": True})
  mesh = mesh_of({"fsdp": 2})
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  gathered = [a.dtype for c in every if c.kind == "all-gather" for a in c.arrays]
  assert gathered.count("u8") == MATRICES * (LAYERS - 1)
