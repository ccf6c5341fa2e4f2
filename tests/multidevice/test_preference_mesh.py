"""Losses of fine-tuning on meshes of devices: loss and gradients as on one."""

import jax
import numpy as np
import pytest
from equality import RTOL, mesh_of
from helpers import assert_trees_close, micro_batches, random_rows, tiny_config

from ats_jax.config.schema.loss import DistillConfig, DpoConfig, KtoConfig, RewardConfig
from ats_jax.extensions import losses
from ats_jax.model.param import trainable
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import batch_totals
from ats_jax.step.program import make_program

ROWS = 8
TOP_K = 3
LOSSES = (
  DpoConfig(beta=0.5),
  KtoConfig(beta=0.5),
  RewardConfig(),
  DistillConfig(teacher="t", top_k=TOP_K, temperature=2.0),
)
SETTINGS = {
  "data.batch_size": ROWS,
  "data.max_segments": 4,
  "step.accum_steps": 2,
  "orchestrator.mode": "off",
}


def rows_of_pairs(cfg):
  """Four segments in each row, with numbers of a reference."""
  rows = random_rows(cfg, ROWS)
  seq = rows["tokens"].shape[1]
  rows["segment_ids"][:] = np.arange(seq) * 4 // seq + 1
  rows["positions"][:] = np.arange(seq) % (seq // 4)
  starts = rows["positions"] == 0
  rows["reference"] = np.where(starts, -np.arange(seq, dtype=np.float32), 0).astype(np.float32)
  rows["label"] = np.where(starts, np.where(rows["segment_ids"] % 4 < 2, 1, -1), 0)
  rows["label"] = rows["label"].astype(np.float32)
  rng, shape = np.random.default_rng(0), (ROWS, seq * TOP_K)
  rows["teacher_ids"] = rng.integers(0, cfg.model.vocab_size, shape, np.int32)
  rows["teacher_logprobs"] = np.log(rng.uniform(0.1, 0.3, shape)).astype(np.float32)
  return rows


def made_on(sizes, loss):
  text = {"data.format": getattr(loss, "FORMAT", "text"), "step.loss": loss}
  cfg = tiny_config(SETTINGS | text | {f"mesh.{name}": n for name, n in sizes.items()})
  mesh = mesh_of(sizes)
  with on_mesh(cfg, mesh):
    program = make_program(cfg, losses.find(loss.name)(cfg))
    model, rules = program.init().model, program.training_rules(1)
    batch = to_global(micro_batches(rows_of_pairs(cfg), 2), mesh)

    @jax.jit
    def step(model, batch):
      totals = batch_totals(batch, rules, program.objective)
      sums, _, grads = sums_and_grads(
        program.objective, model, batch, totals, jax.random.key(0), rules
      )
      return program.objective.means(sums, totals), grads

    return jax.device_get(step(model, batch))


@pytest.mark.mesh
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize(
  "sizes",
  [{"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}, {"stage": 2, "fsdp": 2}],
  ids=lambda sizes: "-".join(f"{name}{n}" for name, n in sizes.items()),
)
def test_a_loss_is_the_same_on_every_mesh(sizes, loss):
  (many, many_grads), (one, one_grads) = made_on(sizes, loss), made_on({}, loss)
  for name, value in one.items():
    np.testing.assert_allclose(many[name], value, RTOL, err_msg=name)
  of = lambda grads: {k: np.asarray(v) for k, v in enumerate(jax.tree.leaves(trainable(grads)))}
  if "stage" not in sizes:  # which stacks layers by stage
    assert_trees_close(of(many_grads), of(one_grads), rtol=1e-4, atol=1e-6)
