"""Counted matmuls: by hand, against XLA's own count, and against `model.count`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.planner.abstract import batch_on_mesh
from ats_jax.step.program import make_program
from lab.flops import matmul_flops

A, B = jnp.ones((4, 8)), jnp.ones((8, 16))
AB = 2 * 4 * 8 * 16


def test_matmuls_and_convolutions():
  assert matmul_flops(jnp.matmul, A, B) == AB
  assert matmul_flops(lambda a, b: jnp.einsum("ij,jk->ki", a, b) + 1, A, B) == AB
  batched = functools.partial(jnp.einsum, "bij,bjk->bik")
  assert matmul_flops(batched, jnp.ones((3, 4, 8)), jnp.ones((3, 8, 16))) == 3 * AB
  # Each of 2 x 5 x 7 outputs sums 3 x 11 products; with groups of channels 3 x 1.
  conv = functools.partial(
    jax.lax.conv_general_dilated,
    window_strides=(1,),
    padding="SAME",
    dimension_numbers=("NWC", "WIO", "NWC"),
  )
  assert matmul_flops(conv, jnp.ones((2, 5, 11)), jnp.ones((3, 11, 7))) == 2 * 2 * 5 * 7 * 3 * 11
  grouped = functools.partial(conv, feature_group_count=11)
  assert matmul_flops(grouped, jnp.ones((2, 5, 11)), jnp.ones((3, 1, 11))) == 2 * 2 * 5 * 11 * 3


@jax.custom_vjp
def twice(a, b):
  return a @ b


twice.defvjp(lambda a, b: (a @ b, (a, b)), lambda ab, y: (y @ ab[1].T, ab[0].T @ y))


def test_every_way_to_nest():
  square = jnp.ones((4, 4))
  power = lambda n: lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=n)[0]
  assert matmul_flops(power(5), square) == 5 * 128
  assert matmul_flops(jax.vmap(power(5)), jnp.ones((3, 4, 4))) == 3 * 5 * 128
  nested = lambda x: jax.lax.scan(lambda c, _: (power(5)(c), None), x, length=7)[0]
  assert matmul_flops(nested, square) == 35 * 128
  assert matmul_flops(lambda x: jax.lax.fori_loop(0, 9, lambda _, c: c @ c, x), square) == 9 * 128
  assert matmul_flops(jax.jit(jax.jit(power(2))), square) == 2 * 128
  branches = (power(1), power(4), lambda x: x)
  assert matmul_flops(lambda i, x: jax.lax.switch(i, branches, x), 0, square) == 4 * 128
  loss = lambda f: jax.grad(lambda a, b: f(a, b).sum(), (0, 1))
  assert matmul_flops(loss(twice), A, B) == 3 * AB
  keep_nothing = jax.checkpoint(lambda a, b: jnp.tanh(a @ b))
  assert matmul_flops(loss(keep_nothing), A, B) == 4 * AB  # forward, again, two gradients


def test_a_loop_of_unknown_length():
  grow = lambda x: jax.lax.while_loop(lambda c: c.sum() < 1e6, lambda c: c @ c, x)
  with pytest.raises(ValueError, match=r"while loop .* Use jax\.lax\.scan"):
    matmul_flops(grow, jnp.ones((4, 4)))
  harmless = lambda x: jax.lax.while_loop(lambda c: c.sum() < 1e6, lambda c: c + 1, x)
  assert matmul_flops(harmless, jnp.ones((4, 4))) == 0


def test_a_kernel_is_refused():
  from jax.experimental import pallas as pl

  def kernel(x, y):
    y[...] = x[...] @ x[...]

  x = jnp.ones((8, 8))
  f = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
  with pytest.raises(ValueError, match=r"FLOPs of pallas_call .* ops\.kernels=attention=xla"):
    matmul_flops(f, x)


def test_an_island_counts_on_every_device():
  with jax.set_mesh(make_test_mesh(2, 1, 2)):
    spread = jax.shard_map(
      lambda a, b: a @ b, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"),
      check_vma=False,
    )  # fmt: skip
    f = lambda a, b: spread(jax.reshard(a, jax.P("data")), b)
    # The two devices along `tensor` do the same work twice.
    assert matmul_flops(f, A, B) == 2 * AB


MEASURED = {
  "model.vocab_size": 256,
  "model.num_layers": 2,
  "model.d_model": 128,
  "model.d_ff": 384,
  "data.seq_len": 128,
  "data.batch_size": 2,
  "step.scan_unroll": 2,
  "step.loss_chunk_tokens": 256,  # one chunk: XLA counts the body of a loop once
  "ops.kernels": {"attention": "xla"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{"step.remat": "full"}, {"moe.num_experts": 4}])
def test_against_xla_and_the_formula(mesh, settings):
  cfg = tiny_config(MEASURED | settings)
  program = make_program(cfg)
  step = program.init(abstract=True), batch_on_mesh(1, 2, 128), program.training_rules(1)
  counted = matmul_flops(program.train_step, *step)
  # XLA adds elementwise work, which is the larger the narrower the model.
  by_xla = program.train_step.lower(*step).compile().cost_analysis()["flops"]
  assert 1.0 <= by_xla / counted < 1.06

  # The formula's whole attention is what the reference computes, its input embedding is not.
  tokens, counts = cfg.data.batch_size * cfg.data.seq_len, program.counts
  formula = tokens * (counts.flops_full - 6 * counts.parts["embedding"].total)
  if cfg.step.remat == "full":  # and each layer's forward pass once more, up to its last matmul
    layers = sum(counts.parts[part].active for part in ("attention", "dense feed-forward"))
    last = cfg.model.num_layers * cfg.model.d_ff * cfg.model.d_model
    attention = counts.flops_full - 6 * counts.active
    formula += tokens * (2 * (layers - last) + attention / 3)
    assert counted / formula == pytest.approx(1.0, abs=0.005)
  else:  # tiles of the grouped matmul are filled up
    assert 1.0 < counted / formula < 1.2


@pytest.mark.thorough
def test_no_matmul_of_experts_runs_twice(mesh):
  """Beside attention, which XLA's version recomputes, only the router's logits come again, where
  they have no name."""
  counted = {}
  for experts, remat in itertools.product((0, 4), ("none", "dots", "names")):
    cfg = tiny_config(MEASURED | {"moe.num_experts": experts, "step.remat": remat})
    program = make_program(cfg)
    step = program.init(abstract=True), batch_on_mesh(1, 2, 128), program.training_rules(1)
    counted[experts, remat] = matmul_flops(program.train_step, *step)
  again = lambda experts, remat: counted[experts, remat] - counted[experts, "none"]
  logits = 2 * (2 * 128) * 4 * 2 * 128  # tokens, experts, layers, width
  assert again(4, "dots") == again(0, "dots")
  assert again(4, "names") == again(0, "names") + logits
