"""The stack: packing, scan, recomputation, tying; none of them may change the function."""

import canonical
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
  TRAINING,
  assert_trees_close,
  make_decoder,
  named_leaves,
  pack,
  random_rows,
  tiny_config,
)

from ats_jax.model.numerics import unroll_of
from ats_jax.model.param import Role, is_variable

# float32, two layers, activations of order one: matmuls over rows of other lengths add up in
# another order.
RTOL, ATOL = 1e-5, 5e-6
# Gradients pass through each matmul twice.
GRAD_RTOL, GRAD_ATOL = 1e-4, 1e-6

SEQ = 16


def run(model, tokens, lengths):
  return np.asarray(canonical.hidden(model, tokens, *pack(lengths, SEQ))[0])


def hidden(model, rows):
  places = {"positions_BT": rows["positions"], "segment_ids_BT": rows["segment_ids"]}
  return model(rows["tokens"], **places, rules=TRAINING)[0]


def forward(model, rows):
  x = hidden(model, rows)
  return x, model.logits(x)


@st.composite
def document_lengths(draw):
  lengths, left = [], SEQ
  while left and len(lengths) < 4:
    lengths.append(draw(st.integers(1, left)))
    left -= lengths[-1]
  return lengths


@hypothesis.settings(max_examples=15)
@hypothesis.given(document_lengths(), st.integers(0, 2**16))
def test_a_packed_document_equals_the_document_alone(lengths, seed):
  tokens = np.random.default_rng(seed).integers(0, 64, (1, SEQ)).astype(np.int32)
  model = canonical.model(canonical.config("dense"))
  packed = run(model, tokens, [lengths])[0]
  at = 0
  for length in lengths:
    alone = np.zeros((1, SEQ), np.int32)
    alone[0, :length] = tokens[0, at : at + length]
    got = run(model, alone, [[length]])[0, :length]
    np.testing.assert_allclose(packed[at : at + length], got, RTOL, ATOL)
    at += length


@hypothesis.settings(max_examples=15)
@hypothesis.given(document_lengths(), st.integers(0, 3), st.integers(0, 2**16))
def test_changing_one_document_leaves_the_others_bit_equal(lengths, which, seed):
  which %= len(lengths)
  start = sum(lengths[:which])
  inside = slice(start, start + lengths[which])
  tokens = np.random.default_rng(seed).integers(0, 64, (1, SEQ)).astype(np.int32)
  other = tokens.copy()
  other[:, inside] = (other[:, inside] + 1) % 64
  model = canonical.model(canonical.config("dense"))
  before, after = run(model, tokens, [lengths])[0], run(model, other, [lengths])[0]
  outside = np.ones(SEQ, bool)
  outside[inside] = False
  np.testing.assert_array_equal(before[outside], after[outside])
  assert np.all(np.any(before[inside] != after[inside], axis=-1))


def loss_and_grads(cfg):
  return canonical.gradients(cfg, canonical.model(cfg), random_rows(cfg, 4))


@pytest.mark.parametrize(
  "changes",
  [
    {"step.remat": "names", "step.scan_unroll": 3},
    pytest.param({"step.remat": "dots", "step.scan_unroll": 2}, marks=pytest.mark.thorough),
  ],
)
def test_how_it_is_computed_does_not_change_loss_or_gradients(mesh, changes):
  base = {"model.num_layers": 3, "model.dropout": 0.2}
  want_sums, want = loss_and_grads(tiny_config(base))
  sums, grads = loss_and_grads(tiny_config(base | changes))
  np.testing.assert_allclose(sums.objective, want_sums.objective, RTOL)
  assert_trees_close(named_leaves(grads), named_leaves(want), rtol=GRAD_RTOL, atol=GRAD_ATOL)


@pytest.mark.parametrize(
  ("platform", "layers", "changes", "want"),
  [
    ("gpu", 24, {}, 24),
    ("gpu", 33, {}, 1),
    ("gpu", 24, {"step.scan_unroll": 2}, 2),
    ("gpu", 24, {"step.accum_steps": 2}, 24),
    ("gpu", 64, {"mesh.stage": 2, "step.accum_steps": 2}, 64),
    ("gpu", 66, {"mesh.stage": 2, "step.accum_steps": 2}, 1),
    ("gpu", 128, {"mesh.stage": 2, "mesh.stage_rounds": 2, "step.accum_steps": 2}, 128),
    ("gpu", 24, {"precision.deterministic": True}, 1),
    ("gpu", 24, {"precision.fp8": True}, 24),
    ("cpu", 24, {}, 1),
  ],
)
def test_layers_are_unrolled_on_a_gpu(platform, layers, changes, want):
  cfg = tiny_config({"model.num_layers": layers} | changes)
  assert unroll_of(cfg, platform) == want


@pytest.mark.parametrize("remat", ["full", "dots", "names", "qkv", "attention"])
def test_recomputation_keeps_fewer_arrays(mesh, remat):
  """What the backward pass gets from the forward pass, in elements."""

  def residuals(policy):
    cfg = canonical.config("dense", {"step.remat": policy})
    model, rows = canonical.model(cfg), random_rows(cfg, 4)
    backward = jax.eval_shape(lambda m: jax.vjp(lambda m: hidden(m, rows), m)[1], model)
    return sum(leaf.size for leaf in jax.tree.leaves(backward))

  assert residuals(remat) < residuals("none")
  assert residuals("full") <= residuals(remat)


def test_tied_embeddings_share_one_table(mesh):
  tied, untied = (
    canonical.model(canonical.config("dense", {"model.tie_embeddings": t})) for t in (True, False)
  )
  assert set(named_leaves(untied)) - set(named_leaves(tied)) == {".head.weight.value"}
  np.testing.assert_array_equal(tied.head_weights(), tied.embed.weight[...])
  np.testing.assert_array_equal(untied.head_weights(), untied.head.weight[...])


def test_logits_are_the_head_times_the_activations(mesh):
  cfg = canonical.config("dense")
  model, rows = canonical.model(cfg), random_rows(cfg, 2)
  x, logits = jax.jit(forward)(model, rows)
  want = np.asarray(x, np.float64) @ np.asarray(model.head.weight[...], np.float64).T
  assert logits.dtype == jnp.float32 and logits.shape == (2, SEQ, 64)
  np.testing.assert_allclose(logits, want, RTOL, ATOL)


def test_dtypes_are_those_of_the_config(mesh):
  changes = {"precision.param_dtype": "bfloat16", "precision.compute_dtype": "bfloat16"}
  abstract = lambda changes: jax.eval_shape(lambda: make_decoder(tiny_config(changes)))
  every = {"moe.num_experts": 2, "moe.router_bias": True, "moe.dense_first": 1}
  every |= {"model.attn_sinks": True, "model.qkv_bias": True, "mod.routing": "learned"}
  variables = jax.tree.leaves(abstract(changes | every), is_leaf=is_variable)
  found = {(v.role, v.dtype == jnp.bfloat16) for v in variables}
  narrow = {Role.MATRIX, Role.EXPERT, Role.HEAD}
  wide = {Role.EMBEDDING, Role.NORM, Role.ROUTER, Role.BIAS, Role.SINK, Role.BUFFER}
  assert found == {(role, True) for role in narrow} | {(role, False) for role in wide}
  model, rows = abstract(changes), random_rows(tiny_config(), 2)
  x, logits = jax.eval_shape(forward, model, rows)
  assert x.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
  mixed = abstract({"precision.compute_dtype": "bfloat16"})
  assert {leaf.dtype for leaf in jax.tree.leaves(mixed)} == {jnp.dtype("float32")}
  x, _ = jax.eval_shape(forward, mixed, rows)
  assert x.dtype == jax.eval_shape(lambda m: m.head_weights(), mixed).dtype == jnp.bfloat16


def test_initial_standard_deviations(mesh):
  cfg = tiny_config({"model.d_model": 256, "model.d_ff": 512, "model.num_layers": 4})
  leaves = jax.tree.map(np.asarray, named_leaves(jax.jit(lambda: make_decoder(cfg))()))
  residual = 0.02 / np.sqrt(2 * 4)
  want = {".head.weight.value": min(0.02, 0.25 / 16), ".embed.weight.value": 0.02}
  for name, leaf in leaves.items():
    if ".scale" in name:
      assert np.all(leaf == 1.0), name
      continue
    writes = name.endswith(("out.weight.value", "down.weight.value"))
    std = want.get(name, residual if writes else 0.02)
    # The spread of an estimate from n draws is std / sqrt(2n); five of them.
    assert abs(np.std(leaf) - std) < 5 * std / np.sqrt(2 * leaf.size), name
  q = leaves[".segments[0].layers[0].attn.q.weight.value"]
  assert not np.array_equal(q[0], q[1])  # each layer draws its own
