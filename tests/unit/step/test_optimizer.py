"""AdamW against optax's own, moment formats, which parameters decay, validity of the chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_close, make_decoder, named_leaves, tiny_config

from ats_jax.model.param import Param, Role
from ats_jax.ops.registry import XLA
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.adamw import fused_adamw, scale_by_adam
from ats_jax.step.optimizers.base import clip_by_norm, decay_rates
from ats_jax.step.tensors import norm

# Both compute in float32 and differ in the order of a few operations.
RTOL, ATOL = 2e-5, 1e-7
BF16_RTOL = 2**-8
LR = 1e-2


def gradients(params, step):
  """Normal numbers whose size differs from leaf to leaf and grows with the step."""
  leaves, structure = jax.tree.flatten(params)
  rng = np.random.default_rng(step)
  draw = lambda i, p: jnp.asarray(rng.normal(size=p.shape) * (i + 1) * (step + 1) * 1e-2, p.dtype)
  return jax.tree.unflatten(structure, [draw(i, p) for i, p in enumerate(leaves)])


def run(tx, params, lr, steps=4):
  @jax.jit
  def update(params, state, grads):
    directions, state = tx.update(grads, state, params)
    return optax.apply_updates(params, jax.tree.map(lambda d: lr * d, directions)), state

  state = tx.init(params)
  for step in range(steps):
    params, state = update(params, state, gradients(params, step))
  return params, state


@pytest.fixture
def params():
  rng = np.random.default_rng(0)
  matrix = lambda x: Param(x, axes=("embed", "ff"), role=Role.MATRIX)
  return {
    "a": matrix(jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)),
    "b": matrix(jnp.ones((7, 1))),
  }


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e6])
def test_equals_optax_adamw(params, clip):
  settings = {"grad_clip": clip, "b1": 0.8, "b2": 0.99, "eps": 1e-4, "weight_decay": 0.3}
  cfg = tiny_config({f"optimizer.{name}": value for name, value in settings.items()})
  adamw = optax.adamw(LR, b1=0.8, b2=0.99, eps=1e-4, weight_decay=0.3)
  reference = optax.chain(optax.clip_by_global_norm(clip), adamw) if clip else adamw
  got, _ = run(build_optimizer(cfg, "cpu").tx, params, -LR)
  want, _ = run(reference, params, 1.0)
  assert_trees_close(got, want, rtol=RTOL, atol=ATOL)


def test_a_known_norm_is_taken_for_the_gradients_own(params):
  clip, grads = clip_by_norm(0.5, "cpu"), gradients(params, 300)
  clipped, _ = clip.update(grads, clip.init(params))
  told, _ = clip.update(grads, clip.init(params), grad_norm=2.0 * norm(grads))
  np.testing.assert_allclose(norm(clipped), 0.5, rtol=1e-6)
  np.testing.assert_allclose(norm(told), 0.25, rtol=1e-6)


@pytest.mark.parametrize(("mu", "nu"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_are_kept_as_configured(params, mu, nu):
  no_clip = {"optimizer.grad_clip": 0.0}
  cfg = tiny_config({"optimizer.mu_dtype": mu, "optimizer.nu_dtype": nu, **no_clip})
  got, (adam, _) = run(build_optimizer(cfg, "cpu").tx, params, -LR, steps=2)
  dtypes = lambda tree: {leaf.dtype for leaf in jax.tree.leaves(tree)}
  assert (dtypes(adam.mu), dtypes(adam.nu)) == ({jnp.dtype(mu)}, {jnp.dtype(nu)})
  assert dtypes(got) == {jnp.dtype("float32")} and int(adam.steps) == 2
  plain, (want, _) = run(build_optimizer(tiny_config(no_clip), "cpu").tx, params, -LR, 2)
  assert_trees_close(adam.mu, want.mu, rtol=2 * BF16_RTOL, atol=1e-6)
  assert_trees_close(adam.nu, want.nu, rtol=2 * BF16_RTOL, atol=1e-9)
  # Rounded moments change a step of size lr by their relative error.
  assert_trees_close(got, plain, rtol=0, atol=4 * 2 * LR * BF16_RTOL)


def test_bfloat16_gradients_and_parameters_use_float32_arithmetic(params):
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
  tx = scale_by_adam(0.9, 0.95, 1e-8, jnp.dtype("float32"), jnp.dtype("float32"))
  grads = gradients(half, 0)
  directions, state = tx.update(grads, tx.init(half), half)
  want, _ = tx.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), tx.init(params), params)
  assert {d.dtype for d in jax.tree.leaves(directions)} == {jnp.dtype("float32")}
  assert_trees_close(directions, want, rtol=RTOL, atol=0)
  assert {v.dtype for v in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
  ("clip", "moments", "decay"), [(0.05, "float32", 0.3), (0.0, "bfloat16", 0.0)]
)
def test_the_fused_update_follows_the_chain(params, mesh, clip, moments, decay):
  settings = {"grad_clip": clip, "weight_decay": decay, "mu_dtype": moments, "nu_dtype": moments}
  cfg = tiny_config({f"optimizer.{name}": value for name, value in settings.items()})
  optimizer, rate = build_optimizer(cfg, "cpu"), jnp.float32(LR)
  found = []
  for step_of in (
    jax.jit(lambda p, g, s: optimizer.update(p, g, s, rate)),
    jax.jit(lambda p, g, s: fused_adamw(cfg, XLA, p, g, s, rate)),
  ):
    new, state, norms = params, optimizer.tx.init(params), []
    for step in range(4):
      new, state, *of_step = step_of(new, gradients(new, step), state)
      norms.append(of_step)
    found.append((new, state, norms))
  (want, want_state, want_norms), (got, got_state, norms) = found
  assert jax.tree.structure(got_state) == jax.tree.structure(want_state)
  kinds = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
  assert kinds((got, got_state)) == kinds((want, want_state))
  np.testing.assert_allclose(norms, want_norms, rtol=RTOL)
  # Sums in another order may fall on the other side of a rounding to bfloat16.
  rtol, atol = (RTOL, ATOL) if moments == "float32" else (2 * BF16_RTOL, 4 * LR * BF16_RTOL)
  assert_trees_close(got, want, rtol=rtol, atol=atol)
  assert_trees_close(got_state, want_state, rtol=rtol, atol=ATOL)


@pytest.mark.parametrize(("embeddings", "tied"), [(False, True), (True, False)])
def test_only_matrices_decay(mesh, embeddings, tied):
  cfg = tiny_config(
    {
      "model.qk_norm": True,
      "model.tie_embeddings": tied,
      "optimizer.decay_embeddings": embeddings,
    }
  )
  model = jax.eval_shape(lambda: make_decoder(cfg))
  mask = named_leaves(decay_rates(cfg, model))
  kept = {
    f".segments[0].layers[0].{n}" for n in ("attn.q_norm", "attn.k_norm", "attn_norm", "mlp_norm")
  }
  kept = {f"{name}.scale.value" for name in (*kept, ".final_norm")}
  assert {name for name, decays in mask.items() if not decays} == (
    kept if embeddings else kept | {".embed.weight.value"}
  )
  matrices = {"q", "k", "v", "out", "gate", "up", "down"} | (set() if tied else {"head"})
  decaying = {
    name.removesuffix(".weight.value").split(".")[-1] for name, decays in mask.items() if decays
  }
  assert decaying == (matrices | {"embed"} if embeddings else matrices)
