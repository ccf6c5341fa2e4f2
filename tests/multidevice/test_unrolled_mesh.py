"""Unrolled layers on meshes: gradients in order, gathered weights kept; values of one device."""

import jax
import pytest
from equality import RTOL, assert_equal, assert_lies_still, config_of, mesh_of, run
from flax import nnx
from helpers import TRAINING, random_rows, when

from ats_jax.model.decoder import Decoder
from ats_jax.model.numerics import numerics
from ats_jax.sharding.mesh import on_mesh

UNROLLED = ("step.scan_unroll", 2)
KEPT = ("keep_gathered", True)
# With its small one Adam makes steps of rounded gradients that move a token to another expert.
LARGE_EPS = ("optimizer.eps", 1e-3)
CASES = {
  "dense, fsdp": ("dense", ("fsdp", 4), KEPT),
  "moe, fsdp": ("moe", ("fsdp", 4), KEPT),
  "mod, fsdp, tensor": ("mod", ("fsdp", 2), ("tensor", 2), KEPT),
  "hybrid, fsdp, expert": ("hybrid", ("fsdp", 2), ("expert", 2), KEPT),
  "latent, fsdp, context": ("latent", ("fsdp", 2), ("context", 2), KEPT),
  "dense, fsdp, context": ("dense", ("fsdp", 2), ("context", 2)),
  "moe, expert": ("moe", ("expert", 2)),
  "dense, tensor": ("dense", ("tensor", 2)),
  "hybrid, context": ("hybrid", ("context", 2)),
}


@pytest.mark.parametrize(
  "case",
  [pytest.param(c, marks=when(i, quick=(7,), ci=(1, 3, 4))) for i, c in enumerate(CASES)],
)
def test_unrolled_layers_have_the_values_of_one_device(case):
  kind, *sizes = CASES[case]
  alike = [LARGE_EPS] if case == "hybrid, fsdp, expert" else []
  many = run(kind, *sizes, UNROLLED, *alike)
  # Sums over devices and over layers come in another order than in a loop on one.
  assert_equal(many, run(kind, *alike), of_largest=RTOL / 5)
  assert_lies_still(many)


@pytest.mark.parametrize("keep", [False, True])
def test_layers_that_are_gathered_again_leave_no_slices_behind(keep):
  """What the backward pass gets: the stack itself, or gathered matrices of each layer."""
  sizes = {"fsdp": 2, "step.remat": "full", "step.scan_unroll": 2, "model.dropout": 0.0}
  sizes |= {"keep_gathered": keep}
  cfg = config_of("dense", sizes)
  with on_mesh(cfg, mesh_of(sizes)):
    model = Decoder(cfg, numerics(cfg), nnx.Rngs(params=jax.random.key(0)))
    rows = random_rows(cfg, 4)
    read = lambda model: model(
      rows["tokens"],
      positions_BT=rows["positions"],
      segment_ids_BT=rows["segment_ids"],
      rules=TRAINING,
    )[0]
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(read, model)[1])]
  gate = (cfg.model.d_model, cfg.model.d_ff)
  assert shapes.count(gate) == (2 * 2 if keep else 0)  # of `up` too, in two layers
  assert ((2, *gate) in shapes) != keep
