"""Optimizers beside those of PyTorch and of NVIDIA's emerging_optimizers, on the same gradients."""

import emerging_optimizers.orthogonalized_optimizers as orthogonalized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import tiny_config

from ats_jax.model.param import Param, Role
from ats_jax.ops import newton_schulz
from ats_jax.step.optimizers import build_optimizer

pytestmark = pytest.mark.hf

LR, DECAY, UPDATES = 1e-2, 0.1, 200
SIDES = {"wide": (8, 24), "high": (16, 6), "square": (8, 8)}  # inputs and outputs
# Theirs divides by the norm alone, and rounds the polynomials to four digits.
MUON = {
  "lr": LR, "nesterov": True, "coefficient_type": "polar_express", "num_ns_steps": 5,
  "fp32_matmul_prec": "highest",
}  # fmt: skip
PRECISE = {"iteration_dtype": "float32"}


def draw(seed):
  """A matrix of each shape, float32 [inputs, outputs]."""
  rng = np.random.default_rng(seed)
  return {name: rng.normal(size=sides).astype(np.float32) for name, sides in SIDES.items()}


def ours(name, settings):
  """Matrices after updates by random gradients, each as a stack of one layer."""
  chosen = {"name": name, "grad_clip": 0.0, "weight_decay": DECAY, **settings}
  cfg = tiny_config({f"optimizer.{key}": value for key, value in chosen.items()})
  optimizer = build_optimizer(cfg, "cpu")
  tree = lambda seed: {
    name: Param(jnp.asarray(x)[None], axes=("embed", "ff"), role=Role.MATRIX)
    for name, x in draw(seed).items()
  }
  step = jax.jit(lambda p, g, s: optimizer.update(p, g, s, jnp.float32(LR))[:2])
  params = tree(0)
  state = optimizer.tx.init(params)
  for seed in range(1, UPDATES + 1):
    params, state = step(params, tree(seed), state)
  return {name: np.asarray(param[...][0]) for name, param in params.items()}


def theirs(make, **settings):
  """The same by an optimizer of PyTorch, whose matrices are [outputs, inputs]."""
  to = lambda x: torch.from_numpy(x.T.copy())
  params = {name: torch.nn.Parameter(to(x)) for name, x in draw(0).items()}
  optimizer = make(list(params.values()), **settings)
  for seed in range(1, UPDATES + 1):
    for name, grad in draw(seed).items():
      params[name].grad = to(grad)
    optimizer.step()
  return {name: param.detach().numpy().T for name, param in params.items()}


@pytest.mark.parametrize(
  ("name", "settings", "make", "of_theirs", "tolerance"),
  [
    (
      "adamw",
      {},
      torch.optim.AdamW,
      {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": DECAY},
      5e-5,
    ),
    (
      "muon",
      PRECISE,
      orthogonalized.Muon,
      {**MUON, "weight_decay": DECAY, "scale_mode": "spectral", "extra_scale_factor": 0.2},
      1e-3,
    ),
    (
      "muon",
      PRECISE | {"update_size": "spectral", "weight_decay": 0.0},
      orthogonalized.Muon,
      {**MUON, "weight_decay": 0.0, "scale_mode": "unit_rms_norm"},
      1e-3,
    ),
    ("muonh", PRECISE, orthogonalized.MuonHyperball, {**MUON, "weight_decay": 0.0}, 1e-3),
  ],
)
def test_two_hundred_updates(name, settings, make, of_theirs, tolerance, monkeypatch):
  monkeypatch.setattr(newton_schulz, "MARGIN", 1.0)
  got, want, start = ours(name, settings), theirs(make, **of_theirs), draw(0)
  for matrix in SIDES:
    moved = np.abs(want[matrix] - start[matrix]).max()
    assert moved > 0.1
    np.testing.assert_allclose(got[matrix], want[matrix], rtol=0, atol=tolerance * moved)
