"""Unrolled layers on meshes: what the backward pass gets of gathered weights."""

import jax
import pytest
from equality import config_of, mesh_of
from helpers import TRAINING, random_rows

from ats_jax.sharding.mesh import on_mesh
from ats_jax.step.program import make_program


@pytest.mark.mesh
@pytest.mark.parametrize("keep", [False, True])
def test_layers_that_are_gathered_again_leave_no_slices_behind(keep):
  """What the backward pass gets: the stack itself, or gathered matrices of each layer."""
  sizes = {"fsdp": 2, "step.remat": "full", "step.scan_unroll": 2, "model.dropout": 0.0}
  sizes |= {"keep_gathered": keep}
  cfg = config_of("dense", sizes)
  with on_mesh(cfg, mesh_of(sizes)):
    model = make_program(cfg).init(abstract=True).model
    rows = random_rows(cfg, 4)
    read = lambda model: model(
      rows["tokens"],
      positions_BT=rows["positions"],
      segment_ids_BT=rows["segment_ids"],
      rules=TRAINING,
    )[0]
    kept = jax.eval_shape(lambda model: jax.vjp(read, model)[1], model)
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
  gate = (cfg.model.d_model, cfg.model.d_ff)
  assert shapes.count(gate) == (2 * 2 if keep else 0)  # of `up` too, in two layers
  assert ((2, *gate) in shapes) != keep
