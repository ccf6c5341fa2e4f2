"""A mesh that does not divide a model is refused by the name of the setting."""

import pytest
from helpers import tiny_config

from ats_jax.planner.abstract import abstract_mesh, abstract_state
from ats_jax.sharding.mesh import on_mesh

MOE = {"moe.num_experts": 4, "moe.top_k": 2}


def check(changes):
  cfg = tiny_config(changes)
  with on_mesh(cfg, abstract_mesh(cfg)):
    abstract_state(cfg)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"mesh.fsdp": 3}, "mesh.fsdp=3 does not divide model.d_model=32, over which weights are"),
    ({"mesh.fsdp": 3, "mesh.zero": 2}, "mesh.fsdp=3 does not divide .*, over which gradients are"),
    ({"mesh.fsdp": 3, "mesh.zero": 1}, "mesh.fsdp=3 does not divide .*, over which moments are"),
    ({"mesh.fsdp": 16, "model.d_model": 40}, "mesh.fsdp=16 does not divide model.d_model=40"),
    ({"mesh.tensor": 2, "model.d_ff": 65}, "mesh.tensor=2 does not divide model.d_ff=65"),
    (MOE | {"mesh.tensor": 2, "moe.d_ff": 33}, "mesh.tensor=2 does not divide moe.d_ff=33"),
    (
      MOE | {"mesh.tensor": 2, "moe.num_shared": 1, "moe.d_ff": 33},
      "mesh.tensor=2 does not divide moe.d_ff=33",
    ),
    (
      {"mesh.fsdp": 2, "model.num_kv_heads": 4, "model.kv_latent_dim": 9}
      | {"model.latent_rope_dim": 2},
      "mesh.fsdp=2 does not divide model.kv_latent_dim or q_latent_dim=9",
    ),
  ],
)
def test_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    check({"data.batch_size": 48} | changes)


def test_a_dimension_that_nothing_has_is_not_asked_for():
  """With tied embeddings and experts in all layers there is neither a head nor a dense layer."""
  check(MOE | {"mesh.tensor": 2, "model.d_ff": 65, "moe.d_ff": 32, "model.tie_embeddings": True})


def test_a_mesh_that_divides_all():
  check(MOE | {"mesh.tensor": 2, "mesh.fsdp": 4, "mesh.expert": 2})
