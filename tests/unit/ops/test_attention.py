"""Attention against one token at a time in float64 numpy; the choice of its implementation."""

import functools
import inspect
from unittest import mock

import cudnn_stand_in
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kernels_of, make_test_mesh, pack, tiny_config

from ats_jax.ops import _compat, requirements
from ats_jax.ops.attention import chunked
from ats_jax.ops.attention.causal import attention, cached_attention
from ats_jax.ops.attention.cudnn import segment_bounds
from ats_jax.ops.registry import FallbackError, choose_op
from ats_jax.ops.remat import remat_policy
from ats_jax.ops.requirements import Device

pytestmark = pytest.mark.compat

# float32 softmax over at most 24 keys of unit-normal scores.
RTOL, ATOL = 1e-5, 1e-6

# Rows of 24: many short documents, one long, padding at the end, padding only.
LENGTHS = [[1, 2, 3, 4, 5, 9], [24], [7, 10], [1] * 8 + [5], []]
SEQ = 24
SINKS = [-1.0, 0.0, 0.5, 2.0]


def make_qkv(batch, heads, kv_heads, seq=SEQ, head_dim=8, seed=0):
  rng = np.random.default_rng(seed)
  shapes = [(batch, seq, n, head_dim) for n in (heads, kv_heads, kv_heads)]
  return [rng.normal(size=s).astype(np.float32) for s in shapes]


def reference(q, k, v, segment_ids, *, window=None, soft_cap=None, sinks=None):
  """Each query alone: the earlier tokens of its own segment, its group's key/value head."""
  q, k, v = (a.astype(np.float64) for a in (q, k, v))
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
    seen = seen[-window:] if window else seen
    scores = k[b, seen, n // group] @ q[b, t, n] / np.sqrt(q.shape[-1])
    scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
    weights = np.exp(scores)
    total = weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
    out[b, t, n] = weights @ v[b, seen, n // group] / total
  return out


run = jax.jit(attention, static_argnames=("window", "soft_cap", "max_segments"))


@pytest.mark.parametrize(
  ("kv_heads", "window", "soft_cap", "sinks"),
  [(4, None, None, None), (1, 1, 0.7, None), (2, 4, None, SINKS)],
)
def test_xla_matches_one_token_at_a_time(mesh, kv_heads, window, soft_cap, sinks):
  q, k, v = make_qkv(len(LENGTHS), 4, kv_heads)
  segments, _ = pack(LENGTHS, SEQ)
  rule = dict(window=window, soft_cap=soft_cap)
  sinks_N = None if sinks is None else jnp.array(sinks)
  got = run(q, k, v, sinks_N=sinks_N, segment_ids_BT=segments, max_segments=10, **rule)
  np.testing.assert_allclose(got, reference(q, k, v, segments, sinks=sinks, **rule), RTOL, ATOL)


def agree(implementation, qkv, segments, window, soft_cap, sinks):
  """Values and gradients are those of scores that are all in memory."""

  @functools.partial(jax.jit, static_argnums=0)
  def results(implementation, q, k, v, sinks_N):
    def f(q, k, v, sinks_N):
      how = dict(segment_ids_BT=segments, max_segments=10, window=window, soft_cap=soft_cap)
      kernels = kernels_of("attention", implementation)
      return attention(q, k, v, sinks_N=sinks_N, kernels=kernels, **how)

    y, pull = jax.vjp(f, q, k, v, sinks_N)
    return y, pull(jnp.cos(y))

  sinks_N = None if sinks is None else jnp.array(sinks)
  found, want = (results(name, *qkv, sinks_N) for name in (implementation, "xla"))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, RTOL, ATOL)


@pytest.mark.parametrize(("window", "soft_cap", "sinks"), [(None, None, SINKS), (6, 0.7, None)])
def test_chunks_of_queries_change_neither_value_nor_gradient(
  monkeypatch, mesh, window, soft_cap, sinks
):
  monkeypatch.setattr(chunked, "CHUNK", 7)
  q, k, v = make_qkv(len(LENGTHS), 4, 2)
  segments, _ = pack(LENGTHS, SEQ)

  agree("chunked", (q, k, v), segments, window, soft_cap, sinks)


@pytest.mark.parametrize(
  ("window", "soft_cap", "sinks"), [(None, None, None), (40, None, SINKS), (None, 5.0, None)]
)
def test_splash_attention_changes_neither_value_nor_gradient(
  monkeypatch, mesh, window, soft_cap, sinks
):
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  make = functools.partial(splash.make_splash_mha_single_device, interpret=True)
  monkeypatch.setattr(splash, "make_splash_mha_single_device", make)
  segments, _ = pack([[100, 50, 30], [200]], 200)  # filled up to 256
  agree("splash", make_qkv(2, 4, 2, seq=200), segments, window, soft_cap, sinks)


def test_scores_of_one_chunk_at_a_time_are_in_memory(mesh):
  seq = 8 * chunked.CHUNK
  q = jax.ShapeDtypeStruct((1, seq, 2, 16), jnp.float16)
  ids = jax.ShapeDtypeStruct((1, seq), jnp.int32)
  kernels = kernels_of("attention", "chunked")

  def loss(q, ids):
    return attention(q, q, q, segment_ids_BT=ids, max_segments=2, kernels=kernels).sum()

  compiled = jax.jit(jax.grad(loss)).lower(q, ids).compile()
  scores = 2 * chunked.CHUNK * seq * 4
  # Scores, weights and their gradients; of two chunks at a time it would be twice as much.
  assert compiled.memory_analysis().temp_size_in_bytes < 5 * scores


def test_a_mesh_agrees_with_one_device_in_value_and_gradient():
  q, k, v = make_qkv(8, 4, 2)
  segments, _ = pack((LENGTHS * 2)[:8], SEQ)

  def loss(q, k, v):
    y = attention(q, k, v, segment_ids_BT=segments, max_segments=10)
    return jnp.sum(jnp.sin(y))

  results = []
  for sizes in ((1, 1, 1), (2, 2, 2)):
    with jax.set_mesh(make_test_mesh(*sizes)):
      results.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v))
  for one, many in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(np.asarray(many), np.asarray(one), RTOL, ATOL)


def test_bfloat16_scores_are_summed_and_normalised_in_float32(mesh):
  q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in make_qkv(1, 2, 2, seq=512))
  segments = np.ones((1, 512), np.int32)
  got = run(q, k, v, segment_ids_BT=segments, max_segments=2)
  assert got.dtype == jnp.bfloat16
  wide = (a.astype(jnp.float32) for a in (q, k, v))
  want = run(*wide, segment_ids_BT=segments, max_segments=2)
  # Weights (float32) and the result are rounded to 8 bits once; a bfloat16 softmax over 512 keys
  # is wrong by several per cent.
  np.testing.assert_allclose(np.float32(got), want, rtol=1e-2, atol=4e-3)


def plain_bounds(row, max_segments):
  starts = [i for i in range(len(row)) if i == 0 or row[i] != row[i - 1]]
  lengths = np.diff([*starts, len(row)]).tolist()
  fill = lambda values, size: values + [-1] * (size - len(values))
  return fill(starts, max_segments + 1), fill(lengths, max_segments)


bounds = jax.jit(segment_bounds, static_argnums=1)


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans())
def test_segment_bounds(lengths, padded):
  # One shape for all examples: rows of 37, at most 7 runs (6 documents and the padding).
  seq, max_segments = 37, 7
  if not padded:
    lengths = [*lengths[:-1], seq - sum(lengths[:-1])]
  segments, _ = pack([lengths], seq)
  starts, found = bounds(segments, max_segments)
  want_starts, want_lengths = plain_bounds(segments[0].tolist(), max_segments)
  assert starts[0].tolist() == want_starts
  assert found[0].tolist() == want_lengths
  assert starts.dtype == found.dtype == jnp.int32


@pytest.mark.parametrize(
  ("remat", "window", "with_sinks", "runs"),
  [
    ("names", 5, True, 1),
    pytest.param("attention", None, False, 10, marks=pytest.mark.thorough),
  ],
)
def test_what_surrounds_the_cudnn_kernel_changes_neither_value_nor_gradient(
  monkeypatch, remat, window, with_sinks, runs
):
  """Bounds of segments, sinks, mesh and names for remat; the kernel itself runs in tests/gpu."""
  cudnn_stand_in.install(monkeypatch)
  q, k, v = make_qkv(8, 4, 2)
  segments, _ = pack((LENGTHS * 2)[:8] if runs > 1 else [[SEQ]] * 8, SEQ)
  sinks = jnp.array(SINKS) if with_sinks else None

  def loss(q, k, v, sinks, implementation):
    how = dict(segment_ids_BT=segments, window=window, max_segments=runs)
    kernels = kernels_of("attention", implementation)
    f = lambda q, k, v, sinks: attention(q, k, v, sinks_N=sinks, kernels=kernels, **how)
    if implementation == "cudnn":
      f = jax.checkpoint(f, policy=remat_policy(remat))
    y = f(q, k, v, sinks)
    return jnp.sum(jnp.sin(y)), y

  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), static_argnums=4)
    found, want = (run(q, k, v, sinks, name) for name in ("cudnn", "xla"))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), RTOL, ATOL)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (dict(window=0), "window is 0: at least 1"),
    (dict(soft_cap=-1.0), "soft_cap is -1.0: a positive"),
    (dict(soft_cap=5.0, kernels=kernels_of("attention", "cudnn")), "cudnn has no soft_cap"),
  ],
)
def test_what_attention_cannot_do_is_an_error(mesh, changes, words):
  q, k, v = make_qkv(1, 4, 2)
  run = dict(segment_ids_BT=np.ones((1, SEQ), np.int32), max_segments=2)
  with pytest.raises(ValueError, match=words):
    attention(q, k, v, **run | changes)


extend = jax.jit(cached_attention)


@hypothesis.settings(max_examples=8)
@hypothesis.given(st.lists(st.sampled_from([1, 8]), min_size=1, max_size=6))
def test_cached_attention_equals_full_attention_for_any_split(parts):
  sinks, sinks_N = SINKS, jnp.array(SINKS)
  length, slots = sum(parts), 50
  q, k, v = make_qkv(2, 4, 2, seq=length)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    k_cache = v_cache = np.full((2, slots, 2, 8), 1e3, np.float32)  # later slots must not show
    pieces, at = [], 0
    for part in parts:
      new = slice(at, at + part)
      index = np.broadcast_to(np.arange(at, at + part), (2, part))
      y, k_cache, v_cache = extend(
        q[:, new], k[:, new], v[:, new], k_cache, v_cache, index, sinks_N=sinks_N
      )
      pieces.append(np.asarray(y))
      at += part
  one_document = np.ones((2, length), np.int32)
  np.testing.assert_allclose(
    np.concatenate(pieces, 1), reference(q, k, v, one_document, sinks=sinks), RTOL, ATOL
  )
  for cache, new in ((np.asarray(k_cache), k), (np.asarray(v_cache), v)):
    np.testing.assert_array_equal(cache[:, :length], new)
    assert np.all(cache[:, length:] == 1e3)


HOPPER, AMPERE, TURING = ("gpu", "9.0"), ("gpu", "8.0"), ("gpu", "7.5")
LONG = {"data__seq_len": 2048}
FEW = {"data__seq_len": 2100, "data__max_segments": 16}  # under one for 128 tokens


@pytest.fixture
def triton_is_installed(monkeypatch):
  monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: name)


def choose(cfg, *device):
  return choose_op(cfg, Device(*device), "attention")["forward"]


def config_for(**changes):
  defaults = {"precision.compute_dtype": "bfloat16", "model.head_dim": 64}
  return tiny_config(defaults | {k.replace("__", "."): v for k, v in changes.items()})


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize(
  ("changes", "device", "implementation", "reason"),
  [
    (FEW, HOPPER, "cudnn", "flash attention"),
    (FEW, ("gpu", "10.0"), "cudnn", "flash attention"),
    (FEW | {"data__max_segments": 17}, HOPPER, "triton", "FlexAttention's speed"),
    (FEW | {"data__max_segments": 17}, ("gpu", "10.0"), "cudnn", "flash attention"),
    ({"ops__kernels": {"attention": "cudnn"}}, HOPPER, "cudnn", "ops.kernels=attention=cudnn"),
    ({"ops__kernels": {"attention": "xla"}}, HOPPER, "xla", "ops.kernels=attention=xla"),
    ({"ops__kernels": {"attention": "xla"}, "ops__strict": True}, HOPPER, "xla", "attention=xla"),
    ({}, ("cpu",), "xla", "cuDNN runs on NVIDIA GPUs, this is cpu"),
    ({"ops__strict": True}, ("cpu",), "xla", "reference"),
    ({}, ("tpu",), "xla", "this is tpu"),
    (LONG, ("tpu",), "splash", "flash attention for TPUs"),
    (LONG, AMPERE, "triton", "FlexAttention's speed"),
    ({"ops__strict": True}, AMPERE, "triton", "FlexAttention's speed"),
    ({"ops__kernels": {"attention": "triton"}}, AMPERE, "triton", "ops.kernels=attention=triton"),
    (LONG | {"model__attn_soft_cap": 5.0}, HOPPER, "triton", "FlexAttention's speed"),
    ({}, TURING, "xla", "data.seq_len is 16, scores of 1024 fit"),
    ({"precision__compute_dtype": "float32"}, HOPPER, "xla", "compute_dtype is float32"),
    ({"model__head_dim": 20}, HOPPER, "xla", "head_dim is 20"),
    ({"model__head_dim": 264}, HOPPER, "xla", "head_dim is 264"),
    (FEW | {"model__head_dim": 256}, HOPPER, "cudnn", "flash attention"),
  ],
)
def test_choice_and_its_reason(changes, device, implementation, reason):
  choice = choose(config_for(**changes), *device)
  assert (choice.op, choice.implementation) == ("attention", implementation)
  assert reason in choice.reason and str(choice) == f"attention: {implementation} ({choice.reason})"


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize(
  ("changes", "device", "words"),
  [
    (LONG, TURING, "this GPU has 7.5"),
    ({"model__head_dim": 20}, HOPPER, "head_dim is 20"),
  ],
)
def test_what_cannot_run_is_an_error_where_it_is_asked_for(changes, device, words):
  for name in ("cudnn", "triton"):
    asked = f"ops.kernels=attention={name}: .*{words}.*Use attention=xla"
    with pytest.raises(ValueError, match=asked):
      choose(config_for(ops__kernels={"attention": name}, **changes), *device)
  with pytest.raises(FallbackError, match=f"ops.strict: .*{words}.*ops.strict=false") as error:
    choose(config_for(ops__strict=True, **changes), *device)
  assert "TPU" not in str(error.value)  # what is for others is not missed


def test_without_triton_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
  many = config_for(**FEW | {"data__max_segments": 17})
  assert choose(many, *HOPPER).implementation == "cudnn"
  with pytest.raises(ValueError, match=r"attention=triton: .*pip install triton"):
    choose(config_for(ops__kernels={"attention": "triton"}), *AMPERE)


def test_the_private_cudnn_functions_still_take_what_we_pass():
  q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in make_qkv(1, 4, 2))
  segments, _ = pack([[7, 10]], SEQ)
  bounds = segment_bounds(jnp.asarray(segments), 3)
  accepted = inspect.signature(_compat.cudnn.dot_product_attention)
  with mock.patch.object(_compat.cudnn, "dot_product_attention") as private:
    private.return_value = q, jnp.zeros((3, 4, SEQ))
    _, lse = _compat.cudnn_attention_forward(q, k, v, *bounds, 0.5, window=8)
  bound = accepted.bind(*private.call_args.args, **private.call_args.kwargs).arguments
  assert bound["scale"] == 0.5 and bound["sliding_window_length"] == 8
  for side in ("q", "kv"):
    assert bound[f"{side}_seqlen"].tolist() == [[7, 10, 7]]
    assert bound[f"{side}_offsets"].tolist() == [[0, 7, 17, -1]]
  backward = functools.partial(_compat.cudnn_attention_backward, scale=0.5, window=8)
  gradients = jax.eval_shape(backward, q, k, v, *bounds, q, lse, q)
  assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
  lowered = jax.jit(backward).trace(q, k, v, *bounds, q, lse, q)
  text = lowered.lower(lowering_platforms=("cuda",)).as_text()
  assert "__cudnn$fmhaSoftmaxBackward" in text
  assert "sliding_window_length\\22: 8" in text
