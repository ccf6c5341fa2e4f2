"""Attention by cuDNN and by Triton on packed rows, against the XLA reference in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kernels_of, make_test_mesh

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.ops.attention.causal import attention
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import make_program

pytestmark = pytest.mark.gpu

# Relative Frobenius error of bfloat16 operands against float32; XLA's own bfloat16 gives 2-3e-3.
TOLERANCE = 5e-3
MAX_SEGMENTS = 9


def segment_ids(kind: str, seq: int) -> np.ndarray:
  cuts = {
    "one document": [],
    "as many as allowed": range(seq // MAX_SEGMENTS, seq - 8, seq // MAX_SEGMENTS),
    "lengths 1 and 127": [1, 128, 129, seq - 1],
    "half padding": [seq // 2],
  }[kind]
  ids = np.ones(seq, np.int32)
  for cut in list(cuts)[: MAX_SEGMENTS - 1]:
    ids[cut:] += 1
  if kind == "half padding":
    ids[ids == 2] = 0
  return ids


KINDS = ["one document", "as many as allowed", "lengths 1 and 127", "half padding"]


BOTH = pytest.mark.parametrize("implementation", ["cudnn", "triton"])


@BOTH
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(implementation, kind, head_dim, kv_heads):
  check(implementation, kind, head_dim, kv_heads)


@BOTH
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_sinks(implementation, kind, with_sinks, window):
  check(implementation, kind, 64, 2, with_sinks, window)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_values_narrower_than_keys(implementation, kind):
  """As latent attention of DeepSeek-V3 has them."""
  check(implementation, kind, 192, 8, v_head_dim=128)


@BOTH
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_one_document(implementation, with_sinks, window):
  check(implementation, "one document", 128, 2, with_sinks, window, max_segments=1)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_float16(implementation, kind):
  check(implementation, kind, 128, 2, dtype="float16")


@pytest.mark.parametrize("head_dim", [16, 80, 96, 256])
def test_other_widths_in_triton(head_dim):
  check("triton", "lengths 1 and 127", head_dim, 2)


@pytest.mark.parametrize("seq", [17, 63, 333])
def test_odd_lengths_in_triton(seq):
  check("triton", "one document", 128, 2, seq=seq)


@pytest.mark.parametrize("kind", KINDS)
def test_soft_cap_in_triton(kind):
  check("triton", kind, 64, 2, soft_cap=3.0)


def test_a_neighbouring_document_changes_no_bit_in_triton():
  seq, ids = 640, segment_ids("lengths 1 and 127", 640)
  rng, own = np.random.default_rng(0), ids == 3
  draw = lambda n: rng.standard_normal((1, seq, n, 64)).astype(np.float32)
  before = [draw(n) for n in (8, 2, 2, 8)]
  after = [np.where(own[None, :, None, None], a, 9 * draw(a.shape[2])) for a in before]

  def run(q, k, v, dy):
    f = functools.partial(attend, "triton", ids[None], max_segments=MAX_SEGMENTS)

    @jax.jit
    def both(q, k, v):
      y, pull = jax.vjp(f, q, k, v, None)
      return y, *pull(jnp.asarray(dy, y.dtype))[:3]

    return both(*(jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)))

  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    found = [run(*inputs) for inputs in (before, after)]
  for a, b in zip(*found, strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_array_equal(a[:, own], b[:, own])
    assert (a[:, ~own] != b[:, ~own]).mean() > 0.9


def attend(implementation, ids, q, k, v, sinks, *, max_segments, window=None, soft_cap=None):
  return attention(
    q, k, v,
    segment_ids_BT=jnp.asarray(ids),
    max_segments=max_segments,
    kernels=kernels_of("attention", implementation),
    window=window,
    sinks_N=sinks,
    soft_cap=soft_cap,
  )  # fmt: skip


def check(
  implementation, kind, head_dim, kv_heads, with_sinks=False, window=None, v_head_dim=0,
  max_segments=MAX_SEGMENTS, seq=640, soft_cap=None, dtype="bfloat16",
):  # fmt: skip
  """Values and gradients against XLA in float32."""
  rng = np.random.default_rng(0)
  batch, heads = 3, 8
  wide, narrow = head_dim, v_head_dim or head_dim
  draw = lambda n, h: jnp.asarray(rng.standard_normal((batch, seq, n, h)), dtype)
  q, k, v, dy = draw(heads, wide), draw(kv_heads, wide), draw(kv_heads, narrow), draw(heads, narrow)
  sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32)
  ids = np.stack([segment_ids(kind, seq), segment_ids("one document", seq), segment_ids(kind, seq)])
  options = dict(max_segments=max_segments, window=window, soft_cap=soft_cap)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, q, k, v):
      def f(q, k, v, sinks):
        return attend(implementation, ids, q, k, v, sinks if with_sinks else None, **options)

      y, pull = jax.vjp(f, q, k, v, sinks)
      return y, *pull(dy.astype(y.dtype))

    exact = run("xla", *(x.astype(jnp.float32) for x in (q, k, v)))
    found = run(implementation, q, k, v)
  for name, a, b in zip(("y", "dq", "dk", "dv", "dsinks"), found, exact, strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b)
    if name == "dsinks" and not with_sinks:
      continue
    if name != "dsinks":
      a, b = (np.where((ids > 0)[..., None, None], x, 0) for x in (a, b))
    # With a window of 1 the gradients of queries and keys are nothing but rounding.
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3 * np.sqrt(b.size))
    assert error < TOLERANCE, (name, error)


def test_the_train_step_contains_cudnn():
  config = base_config()
  config.model.vocab_size = 512
  config.data.seq_len = 256
  config.data.max_segments = 1  # of many short documents Triton's is the default
  cfg = resolve(from_config_dict(config), 300)
  with jax.set_mesh(make_mesh(cfg, jax.devices()[:1])):
    program = make_program(cfg)
    assert program.num.kernels.of("attention", "forward") == "cudnn"
    text = program.compile_train_step(program.init(), program.training_rules(1)).as_text()
  assert text.count("__cudnn$fmha") >= 2  # forward and backward
