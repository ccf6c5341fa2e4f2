"""Layers without a loop: as `lax.scan`, with gradients written in place and weights not kept."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import TRAINING, kernels_of, make_test_mesh, tiny_config

from ats_jax.model.decoder import Decoder
from ats_jax.model.numerics import numerics
from ats_jax.model.unroll import run_layers, scan_runs, unstack
from ats_jax.ops.registry import XLA
from ats_jax.step.objective import loss_sums

LAYERS = 3


def body(carry, layer):
  carry = jnp.tanh(carry * layer["w"] + layer["b"])
  return carry, {"mean": jnp.mean(carry)}


@pytest.fixture
def eight_devices():
  mesh = make_test_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    yield mesh


def test_the_same_as_a_scan_with_its_gradients(eight_devices):
  sharding = jax.NamedSharding(eight_devices, jax.P(None, "fsdp"))
  normal = lambda i: np.random.default_rng(i).standard_normal((LAYERS, 8), np.float32)
  draw = lambda i: jax.device_put(normal(i), sharding)
  stack, start = {"w": draw(0), "b": draw(1)}, draw(2)[0]

  def loss(run):
    def of(stack):
      end, outputs = run(stack)
      return jnp.sum(end) + jnp.sum(outputs["mean"] * jnp.arange(1.0, LAYERS + 1))

    return jax.jit(jax.value_and_grad(of))(stack)

  want = loss(lambda s: jax.lax.scan(body, start, s))
  got = loss(lambda s: run_layers([body] * LAYERS, start, unstack(s)))
  in_order = loss(lambda s: run_layers([body] * LAYERS, start, unstack(s), in_order=True))
  other = lambda carry, layer: body(carry, layer)
  runs = loss(lambda s: scan_runs([body, other, other], start, s, 1))
  for found in (got, in_order, runs):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6)
      assert a.sharding == b.sharding


def test_gradients_are_laid_out_by_layer_before_they_are_stacked():
  """Where they are scattered: the optimizer would have to transpose the whole stack."""
  for sizes, is_scattered in (((2, 2, 2), True), ((8, 1, 1), False)):
    with jax.set_mesh(make_test_mesh(*sizes)):
      start, stack = jnp.ones(8), {name: jnp.ones((LAYERS, 8)) for name in "wb"}
      for run, times in (
        (lambda s, x=start: scan_runs([body] * LAYERS, x, s, 1), 1),
        (lambda s, x=start: run_layers([body] * LAYERS, x, unstack(s)), LAYERS),
      ):
        loss = lambda s, run=run: jnp.sum(run(s)[0])
        text = str(jax.make_jaxpr(jax.grad(loss))(stack))
        assert text.count("layout_constraint[") == len(stack) * times * is_scattered


def test_in_order_a_layer_waits_for_the_gradients_of_the_last_but_one(mesh):
  f = lambda carry, layer: (jnp.sin(carry * layer), None)
  run = lambda s: run_layers([f] * LAYERS, jnp.ones(8), list(s), in_order=True)[0].sum()
  jaxpr = jax.make_jaxpr(jax.grad(run))(jnp.ones((LAYERS, 8))).jaxpr
  made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
  barriers = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "optimization_barrier"]
  assert len(barriers) == LAYERS - 1
  for i in barriers:  # the gradients of a layer's input, and of the weights of the one behind it
    of_input, of_weights = jaxpr.eqns[i].invars
    assert made[of_weights] < made[of_input] < i
  # Whatever reads the gradient of a layer's input reads what came out of a barrier.
  held = [jaxpr.eqns[i].invars[0] for i in barriers]
  readers = [i for i, eqn in enumerate(jaxpr.eqns) for v in held if v in eqn.invars]
  assert sorted(readers) == barriers


def test_gradients_of_runs_are_put_side_by_side_not_padded_and_added(mesh):
  other = lambda carry, layer: body(carry, layer)
  run = lambda s: jnp.sum(scan_runs([body, other, other], jnp.ones(8), s, 1)[0])
  stack = {name: jnp.ones((LAYERS, 8)) for name in "wb"}
  text = jax.jit(jax.grad(run)).lower(stack).as_text()
  whole = rf"-> tensor<{LAYERS}x8xf32>"
  assert len(re.findall(rf"stablehlo\.concatenate.*{whole}", text)) == 2
  assert not re.search(rf"stablehlo\.pad.*{whole}", text)


def gradients_for_cuda(kernels=XLA, **changes):
  """The gradients of a decoder as XLA for a GPU gets them."""
  settings = {"model.num_layers": LAYERS, "step.remat": "names", "step.scan_unroll": LAYERS}
  cfg = tiny_config(settings | changes)
  num = numerics(cfg, kernels)
  make = lambda key: Decoder(cfg, num, nnx.Rngs(params=key))
  model = jax.eval_shape(make, jax.random.key(0))
  shape = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  rows = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), shape)
  rows["loss_mask"] = jax.ShapeDtypeStruct((4, 128), jnp.float32)
  loss = lambda model, rows: loss_sums(model, rows, cfg.step, TRAINING, None)[0].objective
  gradients = jax.jit(jax.grad(loss, allow_int=True))
  return model, gradients.trace(model, rows).lower(lowering_platforms=("cuda",)).as_text()


def test_activations_are_fenced_weights_are_not_and_gradients_are_written_in_place(mesh):
  model, text = gradients_for_cuda(**{"step.remat": "full"})
  weight = model.segments[0].layers[0].mlp.gate.weight.get_value()
  one = "x".join(map(str, weight.shape[1:]))
  barriers = re.findall(r"optimization_barrier .*", text)
  stream = f"tensor<4x128x{weight.shape[1]}x"
  assert sum(stream in line for line in barriers) == LAYERS  # or nothing is recomputed
  assert not any(f"tensor<{one}xf32>" in line for line in barriers)
  whole = f"tensor<{LAYERS}x{one}xf32>"
  assert not re.search(rf"stablehlo\.(concatenate|pad).*-> {whole}", text)
  assert re.search(rf"stablehlo\.dynamic_update_slice.*-> {whole}", text)
  assert any(line.endswith(f": {whole}") for line in barriers)  # written before it is read
  places = ", ".join(["tensor<i32>"] * LAYERS)
  assert any(line.endswith(f": {places}") for line in barriers)  # not known to XLA


def test_gathered_weights_are_gathered_again_and_gradients_are_allocated_in_parts(eight_devices):
  model, text = gradients_for_cuda(**{"step.remat": "full"})
  weight = model.segments[0].layers[0].mlp.gate.weight.get_value()
  one = "x".join(map(str, weight.shape[1:]))
  assert any(f"tensor<{one}xf32>" in line for line in re.findall(r"optimization_barrier .*", text))
  allocated = re.findall(r"@AllocateBuffer.*tensor<([\dx]+)xf32>", text)
  assert "x".join(map(str, weight.sharding.shard_shape(weight.shape))) in allocated
  assert "x".join(map(str, weight.shape)) not in allocated


@pytest.mark.thorough
def test_experts_on_a_gpu_are_recomputed_without_a_loop(mesh):
  """`jax.checkpoint` miscounts its barriers where a kernel brings arrays of constants along."""
  kernels = kernels_of("grouped_matmul", "mosaic")
  sizes = {"model.d_model": 64, "moe.num_experts": 4, "moe.top_k": 2, "moe.d_ff": 128}
  sizes |= {"model.num_layers": 2, "step.scan_unroll": 2}
  _, text = gradients_for_cuda(kernels, **sizes, **{"precision.compute_dtype": "bfloat16"})
  assert "mosaic_gpu" in text
