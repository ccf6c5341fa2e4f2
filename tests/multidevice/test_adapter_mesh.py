"""Fine-tuning on meshes: the losses, gradients and scores of one device."""

import numpy as np
import pytest
from equality import RTOL, run

LORA = [("finetune.adapter.name", "lora"), ("finetune.adapter.rank", 3)]
DORA = [("finetune.adapter.name", "dora"), ("finetune.adapter.rank", 3)]
TIED = [("model.tie_embeddings", True), ("finetune.adapter.targets", ("embedding", "q"))]
WIDE = [("model.d_ff", 128)]  # a device has whole groups of codes
# kind of model, sizes and options of the mesh, settings
ROWS = [
  ("dense", [("fsdp", 2), ("tensor", 2)], DORA),
  (
    "dense",
    [("fsdp", 2), ("tensor", 2)],
    [*DORA, ("finetune.adapter.targets", ("embedding", "head"))],
  ),
  ("dense", [("data", 2), ("fsdp", 2), ("zero", 2)], [*LORA, *TIED]),
  ("capacity", [("expert", 2), ("fsdp", 2)], [*LORA, ("finetune.adapter.targets", ("router",))]),
  ("capacity", [("tensor", 2), ("expert", 2), ("fsdp", 2)], LORA),
  ("hybrid", [("data", 2), ("expert", 2)], LORA),
  ("latent", [("fsdp", 2), ("context", 2), ("copy_engines", True), ("step.scan_unroll", 2)], DORA),
  ("dense", [("data", 2), ("fsdp", 2), ("zero", 2), ("step.scan_unroll", 2)], LORA),
  ("dense", [("fsdp", 2), ("tensor", 2)], [("finetune.layers", "1")]),
  ("dense", [("fsdp", 2), ("tensor", 2)], [*LORA, ("finetune.adapter.base", "nf4"), *WIDE]),
  ("capacity", [("expert", 2), ("fsdp", 2)], [*LORA, ("finetune.adapter.base", "int4")]),
  ("hybrid", [("tensor", 2), ("expert", 2)], [*LORA, ("finetune.adapter.base", "int8")]),
]


@pytest.mark.parametrize(
  ("kind", "mesh", "settings"),
  [pytest.param(*row, marks=pytest.mark.mesh if n > 1 else ()) for n, row in enumerate(ROWS)],
)
def test_a_mesh_fine_tunes_as_one_device_does(kind, mesh, settings):
  same = [(name, value) for name, value in mesh if name == "step.scan_unroll"]
  many, one = run(kind, *mesh, *settings), run(kind, *same, *settings)
  np.testing.assert_allclose(many.losses, one.losses, RTOL)
  np.testing.assert_allclose(many.scores, one.scores, RTOL)
  assert many.grads.keys() == one.grads.keys()
  for name, want in one.grads.items():
    np.testing.assert_allclose(many.grads[name], want, RTOL, RTOL * np.abs(want).max(), name)
    first = "embed.adapter.b" if "embed" in name else ".adapter.a"
    at_first_no_gradient = name.removesuffix(".value").endswith(first)
    assert at_first_no_gradient or np.abs(want).max() > 1e-5, name
  assert many.shardings[0] == many.shardings[1]
