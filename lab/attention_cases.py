"""Attention at shapes of real models: a case of an op, as those of `ats_jax.verbs.bench.cases`.

There is nothing to tune in it, so `ats_jax tune` does without.
"""

import jax.numpy as jnp

from ats_jax.config.schema import Config, ModelConfig
from ats_jax.ops.attention.causal import attention
from ats_jax.verbs.bench.cases import Case, Pass, normal


def attention_case(
  batch: int,
  seq: int,
  segments: int,
  heads: int = 32,
  kv_heads: int = 8,
  head_dim: int = 128,
  *,
  max_segments: int = 0,
  window: int | None = None,
  with_sinks: bool = False,
  soft_cap: float | None = None,
) -> Case:
  """Causal attention in rows of equal segments, of which a row may hold `max_segments`; 0 = these.

  XLA's holds seq x seq scores. Where they are too many it is left out, and results are checked at
  2048.
  """
  length = seq // segments
  seen = length / 2 if window is None else min(window, length / 2)  # by a token, about
  flops = 4.0 * batch * heads * head_dim * seq * seen  # two matmuls
  moved = 4 * batch * seq * head_dim * (heads + kv_heads)

  def make(seed):
    draw = lambda i, n: normal(seed + i, (batch, seq, n, head_dim))
    ids = jnp.broadcast_to(jnp.arange(seq) // length + 1, (batch, seq))
    sinks = normal(seed + 3, (heads,), jnp.float32)
    return draw(0, heads), draw(1, kv_heads), draw(2, kv_heads), sinks, ids.astype(jnp.int32)

  def f(kernels, q, k, v, sinks, ids):
    return attention(
      q,
      k,
      v,
      segment_ids_BT=ids,
      max_segments=max_segments or segments,
      kernels=kernels,
      window=window,
      soft_cap=soft_cap,
      sinks_N=sinks if with_sinks else None,
    )

  large, small = batch * heads * seq**2 > 2**30, None
  if large:
    shape = segments, heads, kv_heads, head_dim
    small = attention_case(
      1,
      2048,
      *shape,
      max_segments=max_segments,
      window=window,
      with_sinks=with_sinks,
      soft_cap=soft_cap,
    )
  gradients = (0, 1, 2, 3) if with_sinks else (0, 1, 2)
  extras = f", up to {max_segments}" if max_segments else ""
  extras += (f", window {window}" if window else "") + (", sinks" if with_sinks else "")
  extras += f", soft cap {soft_cap:g}" if soft_cap else ""
  return Case(
    "attention",
    f"B{batch} S{seq} {segments} segments {heads}/{kv_heads} x {head_dim}{extras}",
    {} if window is None else {"window": window},
    f,
    make,
    {
      "forward": Pass(("forward",), (), moved, flops),
      "forward and backward": Pass(("forward",), gradients, 3 * moved, 3.5 * flops, True),
    },
    has_xla=not large,
    check=small,
    cfg=Config(model=ModelConfig(attn_soft_cap=soft_cap or 0.0)),
  )


def real_cases() -> list[Case]:
  """Rows of one and of many documents, with sinks and with a window."""
  return [
    *[attention_case(4, 4096, n) for n in (1, 8, 16, 32)],
    *[attention_case(4, 4096, n, head_dim=64) for n in (1, 8)],
    attention_case(4, 4096, 1, 16, 4, 256),
    *[attention_case(4, 4096, n, max_segments=64) for n in (1, 8)],
    attention_case(4, 4096, 1, 32, 32),
    *[attention_case(1, 16384, n) for n in (1, 8, 32)],
    attention_case(4, 4096, 8, with_sinks=True),
    attention_case(4, 4096, 1, with_sinks=True),
    attention_case(1, 16384, 1, with_sinks=True),
    attention_case(4, 4096, 1, window=1024),
    attention_case(1, 16384, 1, window=1024),
    attention_case(4, 4096, 8, window=1024),
    attention_case(4, 4096, 8, 16, 4, 256),
    attention_case(4, 4096, 1, soft_cap=50.0),
  ]


def toy_cases() -> list[Case]:
  """Seconds on a CPU."""
  return [attention_case(1, 64, 4, 4, 2, 8), attention_case(1, 64, 1, 4, 2, 8, soft_cap=2.0)]
