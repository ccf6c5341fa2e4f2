"""Scores of whole rows are found in compiled programs, and only there."""

import jax
import jax.numpy as jnp
import pytest
from helpers import kernels_of, make_test_mesh

from ats_jax.ops.attention import chunked
from ats_jax.ops.attention.causal import attention
from lab.compiled_program import scores

SEQ = 40  # no other size is as long

TEXT = """HloModule jit_f

%fused_computation (p: f32[8,40]) -> f32[8,40] {
  %inner = f32[8,40,40]{2,1,0} broadcast(%p), dimensions={0,1}
  ROOT %r = f32[8,40]{1,0} reduce(%inner), dimensions={2}
}

ENTRY %main (a: f32[8,40]) -> f32[8,40] {
  ROOT %fusion = f32[8,40]{1,0} fusion(%a), kind=kLoop, calls=%fused_computation
}
"""


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_scores_of_attention(monkeypatch, implementation):
  monkeypatch.setattr(chunked, "CHUNK", 16)
  make = lambda heads: jax.ShapeDtypeStruct((2, SEQ, heads, 8), jnp.float32)
  ids = jax.ShapeDtypeStruct((2, SEQ), jnp.int32)

  def loss(q, k, v, ids):
    how = dict(segment_ids_BT=ids, max_segments=4, window=None, soft_cap=None)
    kernels = kernels_of("attention", implementation)
    return attention(q, k, v, sinks_N=None, kernels=kernels, **how).sum()

  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(make(4), make(2), make(2), ids).compile()
  found = scores(program.as_text() or "", SEQ, least=2 * 4 * SEQ * SEQ)
  assert any(s.startswith("f32") for s in found) == (implementation == "xla"), found
  assert implementation == "xla" or not found


def test_what_stays_within_a_fusion_is_in_no_memory():
  assert not scores(TEXT, SEQ)
  assert scores(TEXT.replace("ROOT %fusion = f32[8,40]{1,0}", "ROOT %fusion = f32[8,40,40]"), SEQ)


def test_smaller_arrays_do_not_count():
  text = f"ENTRY %main (a: f32[2]) -> f32[2] {{\n  %w = f32[3,{SEQ},{SEQ}] custom-call(%a)\n}}\n"
  assert scores(text, SEQ, least=3 * SEQ * SEQ) == {f"f32[3,{SEQ},{SEQ}]"}
  assert not scores(text, SEQ, least=4 * SEQ * SEQ)
