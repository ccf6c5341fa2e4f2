"""Cross-entropy of rows of logits, and its gradient by them."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_cuda.checks import call, expect

MAX_VOCAB = 262_144  # what the threads of a cluster hold in registers


def cross_entropy(
  logits_CV: jax.Array, targets_C: jax.Array, *, label_smoothing: float
) -> jax.Array:
  """What the loss of each row needs. Floor: 4 bytes a logit.

  Args:
    logits_CV: float32 [tokens, vocab]; vocab a multiple of 4, at most 262,144.
    targets_C: int32 [tokens].
    label_smoothing: 0 = the sum of the logits is not wanted.

  Returns:
    float32 [tokens, 4]: log-sum-exp, the target's logit (0 if it is outside of the vocabulary), the
    largest logit, the sum of the logits or 0.

  Raises:
    ValueError: another dtype or shape.
  """
  rows = _check(logits_CV, targets_C)
  settings: dict[str, Any] = dict(label_smoothing=float(label_smoothing))
  return call("ats_cross_entropy", rows, logits_CV, targets_C, **settings)


def cross_entropy_gradient(
  logits_CV: jax.Array,
  targets_C: jax.Array,
  mask_C: jax.Array,
  *,
  z_loss: float,
  label_smoothing: float,
) -> tuple[jax.Array, jax.Array]:
  """Gradient of the masked objective by the logits, which are read once. Floor: 6 bytes a logit.

  The objective is `(1 - s) * (lse - label) + s * (lse - mean of the logits) + z_loss * lse^2` with
  `s = label_smoothing`.

  Args:
    logits_CV: as in `cross_entropy`.
    targets_C: likewise.
    mask_C: float32 [tokens], the weight of each.
    z_loss: see there.
    label_smoothing: see there.

  Returns:
    bfloat16 [tokens, vocab], and what `cross_entropy` returns.

  Raises:
    ValueError: another dtype or shape.
  """
  rows = _check(logits_CV, targets_C, mask_C)
  out = jax.ShapeDtypeStruct(logits_CV.shape, jnp.bfloat16), rows
  settings: dict[str, Any] = dict(z_loss=float(z_loss), label_smoothing=float(label_smoothing))
  return call("ats_cross_entropy_gradient", out, logits_CV, targets_C, mask_C, **settings)


def _check(logits_CV, targets_C, mask_C=None):
  tokens, vocab = expect("cross_entropy", "logits", logits_CV, (None, None), jnp.float32)
  expect("cross_entropy", "targets", targets_C, (tokens,), jnp.int32)
  if mask_C is not None:
    expect("cross_entropy", "mask", mask_C, (tokens,), jnp.float32)
  if vocab % 4 or vocab > MAX_VOCAB:
    raise ValueError(
      f"cross_entropy: rows have {vocab} logits, expected a multiple of 4 and at most {MAX_VOCAB}"
    )
  return jax.ShapeDtypeStruct((tokens, 4), jnp.float32)
