"""Weights that are multiplied in 8 bits cross the links in 8 bits, and nothing else changes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, compiled_step
from equality import CFG, RTOL, mesh_of
from helpers import tiny_config

from ats_jax.ops.linear import linears
from ats_jax.sharding.apply import reshard
from ats_jax.sharding.mesh import on_mesh
from ats_jax.sharding.rules import use_plan

STREAM_AXES = ("batch", "seq", "act_embed")
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


@pytest.mark.compat
def test_operands_are_those_of_weights_that_were_whole():
  """By collectives and as copies."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  x, weights, dy = draw(4, 32, 32), [draw(32, 64), draw(64, 32)], draw(4, 32, 32)
  stored = [("embed", "ff"), ("ff", "embed")]

  def loss(x, weights):
    for weight, axes in zip(weights, stored, strict=True):
      inputs, outputs = (axis.replace("embed", "act_embed") for axis in axes)
      how = dict(inputs=[inputs], outputs=[[outputs]], stored=[axes], fp8=True)
      (x,) = linears(x, [weight], **how)
    return jnp.sum(x * reshard(jnp.asarray(dy), *STREAM_AXES)), x

  results = []
  for plan, copies in (("data_parallel", False), ("default", False), ("default", True)):
    with jax.set_mesh(mesh_of({"fsdp": 2, "tensor": 2})), use_plan(plan, copy_engines=copies):
      placed = [reshard(jnp.asarray(w), *axes) for w, axes in zip(weights, stored, strict=True)]
      f = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
      results.append(jax.tree.leaves(f(reshard(jnp.asarray(x), *STREAM_AXES), placed)))
  whole, *others = results
  for found in others:
    for got, want in zip(found, whole, strict=True):
      np.testing.assert_allclose(got, want, RTOL, RTOL * np.abs(want).max())


def collectives_of(changes):
  cfg = tiny_config(EIGHT | {"mesh.fsdp": 2} | changes)
  mesh = mesh_of({"fsdp": 2})
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  return [a for c in every if c.kind == "all-gather" for a in c.arrays]


@pytest.mark.mesh
def test_matrices_are_gathered_as_bytes():
  gathered = [a for a in collectives_of({}) if len(a.shape) > 1]
  number = Counter(a.dtype for a in gathered if a.dtype != "s32")  # those are tokens
  # Of a loop over layers in 8 bits, of the last layer for both passes, and of the head.
  assert number == {"u8": 2 * MATRICES, "f32": 2 * MATRICES + 1}


@pytest.mark.mesh
def test_matrices_that_are_kept_are_gathered_once():
  unrolled = {"step.remat": "names", "step.scan_unroll": LAYERS, "mesh.keep_gathered": True}
  gathered = [a.dtype for a in collectives_of(unrolled)]
  assert gathered.count("u8") == MATRICES * (LAYERS - 1)
