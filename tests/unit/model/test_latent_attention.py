"""Latent attention: the formulas head by head, over devices, and counted."""

import functools

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_decoder, make_test_mesh, named_leaves, pack, tiny_config
from rope_reference import rotate

from ats_jax.config.build import with_settings
from ats_jax.config.schema import Config
from ats_jax.model.block import tokens_at
from ats_jax.model.count import PartCount, count
from ats_jax.model.latent_attention import LATENT_EPS, LatentAttention
from ats_jax.model.numerics import numerics
from ats_jax.ops.requirements import Device, cudnn_attention
from ats_jax.planner.abstract import abstract_mesh, abstract_state
from ats_jax.planner.memory import kv_cache_bytes, peak
from ats_jax.sharding.apply import reshard

LATENT = canonical.KINDS["latent"] | {"model.init_std": 0.3, "model.attn_scale": 0.5}
BATCH, SEQ, WIDTH = 2, 12, 32
# float32 sums of up to 32 products; scores of order 1.
RTOL, ATOL = 2e-4, 1e-5


@functools.cache
def inputs():
  rng = np.random.default_rng(0)
  x, cotangent = rng.normal(size=(2, BATCH, SEQ, WIDTH)).astype(np.float32)
  return x, cotangent, *pack([[5, 4], [12]], SEQ)


def make(cfg):
  """The layer, with norms that are not 1."""
  attn = LatentAttention(cfg.model, numerics(cfg), nnx.Rngs(params=jax.random.key(0)))
  waves = lambda a: a + 0.1 * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape)
  for norm in filter(None, (attn.q_norm, attn.kv_norm)):
    norm.scale[...] = waves(norm.scale[...])
  return attn


def plain(tree):
  return {
    k.removesuffix(".value").removesuffix(".weight"): np.asarray(v)
    for k, v in named_leaves(tree).items()
  }


def run(cfg):
  """Output, and gradients in the input and the weights, on the current mesh."""
  x, cotangent, segments, positions = inputs()

  @jax.jit
  def f(attn, x, cotangent, segments, positions):
    x, cotangent = (reshard(a, "batch", "seq", "act_embed") for a in (x, cotangent))
    segments, positions = (reshard(a, "batch", "seq") for a in (segments, positions))
    table = tokens_at(cfg.model, positions, segments).rope
    apply = lambda attn, x: attn(x, table, segment_ids_BT=segments)[0]
    y, pullback = jax.vjp(apply, attn, x)
    return y, *pullback(cotangent)

  y, dattn, dx = f(jax.jit(lambda: make(cfg))(), x, cotangent, segments, positions)
  return {"y": np.asarray(y), "x": np.asarray(dx), **plain(dattn)}


def norm(x, scale):
  return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + LATENT_EPS) * scale


def attend(p, x, segments, positions, m):
  """One row, one head at a time; arXiv:2405.04434, equations 37 to 47."""
  visible = (segments[:, None] == segments[None]) & np.tri(SEQ, dtype=bool)
  fixed, latent = m.head_dim - m.latent_rope_dim, m.kv_latent_dim
  c_q = norm(x @ p[".q_down"], p[".q_norm.scale"]) if m.q_latent_dim else x
  both, out = x @ p[".kv_down"], 0.0
  c_kv = norm(both[:, :latent], p[".kv_norm.scale"])
  k_rotated = rotate(both[:, latent:], positions, m.rope_theta)
  for n in range(m.num_heads):
    q, made = c_q @ p[".q"][:, n], c_kv @ p[".kv"][:, n]
    q = jnp.concatenate([q[:, :fixed], rotate(q[:, fixed:], positions, m.rope_theta)], -1)
    k = jnp.concatenate([made[:, :fixed], k_rotated], -1)
    scores = jnp.where(visible, q @ k.T * (m.attn_scale or m.head_dim**-0.5), -1e30)
    out = out + jax.nn.softmax(scores, -1) @ made[:, fixed:] @ p[".out"][n]
  return out


@pytest.mark.thorough
def test_output_and_gradients(mesh):
  cfg = tiny_config(LATENT)
  x, cotangent, segments, positions = inputs()
  params, got = plain(jax.jit(lambda: make(cfg))()), run(cfg)
  with jax.enable_x64(True), jax.set_mesh(None):
    wide = {k: jnp.asarray(v, jnp.float64) for k, v in params.items()}
    rows = lambda p, x: jnp.stack(
      [attend(p, x[b], segments[b], positions[b], cfg.model) for b in range(BATCH)]
    )

    @jax.jit
    def pulled(p, x, cotangent):
      y, pullback = jax.vjp(rows, p, x)
      return y, *pullback(cotangent)

    y, dparams, dx = pulled(wide, *(jnp.asarray(a, jnp.float64) for a in (x, cotangent)))
    assert y.dtype == jnp.float64
  want = {"y": y, "x": dx, **dparams}
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, RTOL, ATOL, err_msg=name)


@pytest.mark.mesh
def test_over_devices_as_on_one():
  cfg = tiny_config(LATENT)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    one = run(cfg)
  with jax.set_mesh(make_test_mesh(1, 2, 2)):
    many = run(cfg)
    shards = {
      name: leaf.addressable_shards[0].data.shape
      for name, leaf in named_leaves(jax.jit(lambda: make(cfg))()).items()
    }
  for name, value in one.items():
    np.testing.assert_allclose(many[name], value, RTOL, ATOL, err_msg=name)
  # Over fsdp the side of the stream or of the latent, over tensor the heads.
  assert {k.split(".")[1]: shape for k, shape in shards.items() if len(shape) > 1} == {
    "q_down": (16, 16),
    "q": (8, 2, 14),
    "kv_down": (16, 18),
    "kv": (6, 2, 18),
    "out": (2, 10, 16),
  }


def test_parameters_flops_and_cache_are_counted(mesh):
  cfg = tiny_config(LATENT)
  model = jax.eval_shape(lambda: make_decoder(cfg))
  counts = count(cfg, model, seq_len=16)
  layer = 32 * 16 + 16 * 4 * 14 + 32 * (12 + 6) + 12 * 4 * (8 + 10) + 4 * 10 * 32
  assert counts.parts["attention"] == PartCount(2 * layer, 2 * layer)
  norms = 2 * (2 * 32 + 16 + 12) + 32
  assert counts.parts["norms"] == PartCount(norms, norms)
  # Forward once, backward twice: scores of 14 and values of 10 multiply-adds a key and head.
  assert counts.flops_full - 6 * counts.active == 3 * 2 * 2 * 4 * (14 + 10) * 16
  assert kv_cache_bytes(cfg, model) == 2 * 16 * (12 + 6) * 4


def test_the_planner_gathers_both_sides_of_the_latents():
  cfg = tiny_config(LATENT | {"mesh.fsdp": 2, "step.remat": "full", "step.scan_unroll": 1})
  with jax.sharding.use_abstract_mesh(abstract_mesh(cfg)):
    parts = peak(cfg, abstract_state(cfg)).parts
  layer = 32 * 16 + 16 * 4 * 14 + 32 * (12 + 6) + 12 * 4 * (8 + 10) + 4 * 10 * 32
  head = 64 * 32
  assert parts["compute weights"] == 4 * (layer + 3 * 32 * 64 + head)


@pytest.mark.thorough
def test_in_eight_bits(mesh):
  """Near what it is in float32, as matrices of e4m3 have relative errors of 2^-4 at most."""
  wide = {"kv_latent_dim": 32, "head_dim": 32, "latent_rope_dim": 16, "v_head_dim": 16}
  cfg = tiny_config(LATENT | {f"model.{name}": value for name, value in wide.items()})
  x, _, segments, positions = inputs()
  x, segments, positions = (np.repeat(a, 2, axis=0) for a in (x, segments, positions))

  @functools.partial(jax.jit, static_argnames="fp8")
  def f(attn, x, *, fp8):
    table = tokens_at(cfg.model, jnp.asarray(positions), jnp.asarray(segments)).rope
    return attn(x, table, segment_ids_BT=jnp.asarray(segments), fp8=fp8)[0]

  attn = jax.jit(lambda: make(cfg))()
  got, want = (np.asarray(f(attn, jnp.asarray(x), fp8=fp8)) for fp8 in (True, False))
  error = np.linalg.norm(got - want) / np.linalg.norm(want)
  assert 0 < error < 0.2


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"kv_latent_dim": 0}, "model.q_latent_dim=16 does nothing with model.kv_latent_dim=0"),
    *(
      ({"latent_rope_dim": dim}, f"model.latent_rope_dim={dim} of a head dimension of 14")
      for dim in (0, 14, 5)
    ),
    *(
      ({name: value}, f"model.{name}={value} with model.kv_latent_dim=12")
      for name, value in (
        ("num_kv_heads", 2),
        ("qk_norm", True),
        ("window", 4),
        ("attn_sinks", True),
        ("attn_out_bias", True),
      )
    ),
  ],
)
def test_settings_that_do_not_go_together(changes, words):
  with pytest.raises(ValueError, match=words):
    with_settings(Config(), LATENT | {f"model.{name}": value for name, value in changes.items()})


def test_latents_that_eight_bits_cannot_take():
  wide = {"precision.fp8": True, "model.head_dim": 16, "model.num_layers": 4}
  with pytest.raises(ValueError, match=r"multiples of 16: model\.kv_latent_dim is 12"):
    with_settings(Config(), LATENT | wide)


def test_cudnn_takes_values_no_wider_than_keys():
  gpu = Device("gpu", "9.0")
  cfg = tiny_config(LATENT | {"model.head_dim": 16, "precision.compute_dtype": "bfloat16"})
  assert not cudnn_attention(cfg, gpu)
  wide = with_settings(cfg, {"model.v_head_dim": 24})
  assert "model.v_head_dim is 24" in cudnn_attention(wide, gpu)
