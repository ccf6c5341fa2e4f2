"""The largest attention logit of each layer: what the op sees, in every kind of model."""

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EVALUATION, make_decoder, make_test_mesh, random_rows, thorough_but

from ats_jax.ops.attention import causal


def logits_of(model, rows):
  fields = {f"{name}_BT": rows[name] for name in ("positions", "segment_ids")}
  run = jax.jit(lambda m: m.largest_logits(rows["tokens"], rules=EVALUATION, **fields))
  return np.asarray(run(model))


@pytest.mark.parametrize("kind", thorough_but(["latent", "dense", "window", "hybrid"], 0))
def test_it_is_the_largest_score_that_a_query_sees(kind, monkeypatch):
  """Compared with numpy on the queries and keys of a plain pass."""
  cfg, seen = canonical.config(kind), []
  rows = random_rows(cfg, 4)

  def largest(q, k, ids, window):
    per_head = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, per_head) * q.shape[-1] ** -0.5
    at = np.arange(q.shape[1])
    sees = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0)
    sees &= (at[:, None] >= at) & (at[:, None] - at < (window or len(at)))
    seen.append(np.where(sees[:, None], scores, -np.inf).max())

  def attention(q, k, v, *, segment_ids_BT, window=None, **more):
    note = lambda *x: largest(*map(np.asarray, x), window)
    jax.debug.callback(note, q, k, segment_ids_BT, ordered=True)
    return causal.attention(q, k, v, segment_ids_BT=segment_ids_BT, window=window, **more)

  with jax.set_mesh(canonical.mesh()):
    model = make_decoder(cfg)
    got = logits_of(model, rows)
    for module in ("attention", "latent_attention"):
      monkeypatch.setattr(f"ats_jax.model.{module}.attention", attention)
    fields = {f"{name}_BT": rows[name] for name in ("positions", "segment_ids")}
    jax.jit(lambda m: m(rows["tokens"], rules=EVALUATION, **fields)[0])(model).block_until_ready()
    jax.effects_barrier()
  if kind == "hybrid":  # its second layer skips tokens
    assert np.isneginf(got[1])
    got, seen = got[:1], seen[:1]
  np.testing.assert_allclose(got, seen, rtol=1e-5)


@pytest.mark.mesh
def test_a_mesh_finds_what_one_device_does():
  cfg = canonical.config("dense")
  rows, found = random_rows(cfg, 8), []
  for mesh in (canonical.mesh(), make_test_mesh(2, 2, 2)):
    with jax.set_mesh(mesh):
      model = jax.jit(lambda: make_decoder(cfg))()
      found.append(logits_of(model, {n: jnp.asarray(x) for n, x in rows.items()}))
  np.testing.assert_allclose(*found, rtol=1e-5)
