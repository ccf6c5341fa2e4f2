"""Unrolled layers on meshes: gradients in order, gathered weights kept; values of one device."""

import pytest
from equality import RTOL, assert_equal, assert_lies_still, run

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
  "dense, tensor": ("dense", ("tensor", 2)),
  "hybrid, context": ("hybrid", ("context", 2)),
}
NOT_EACH_TIME = [name for name in CASES if name not in ("moe, fsdp", "dense, tensor")]


@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=[pytest.mark.mesh] * (c in NOT_EACH_TIME)) for c in CASES]
)
def test_unrolled_layers_have_the_values_of_one_device(case):
  kind, *sizes = CASES[case]
  alike = [LARGE_EPS] if case == "hybrid, fsdp, expert" else []
  many = run(kind, *sizes, UNROLLED, *alike)
  # Sums over devices and over layers come in another order than in a loop on one.
  assert_equal(many, run(kind, *alike), of_largest=RTOL / 5)
  assert_lies_still(many)
