"""A vocabulary that the mesh does not divide: the numbers of one device, and no row of padding."""

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config

from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.sharding.rules import ZERO_AXES
from ats_jax.step.program import make_program

ONE = (1, 1, 1)
RTOL, STEPS = 1e-5, 2


def run(vocab: int, shape: tuple[int, int, int]):
  """Losses, weights and their shardings; sums of an evaluation; logits of a row."""
  cfg = tiny_config(
    {
      "model.vocab_size": vocab,
      "model.tie_embeddings": True,
      "precision.deterministic": True,
      "step.label_smoothing": 0.1,  # divides by the size of the vocabulary
      "step.z_loss": 1e-3,
      "optimizer.eps": 1e-4,
    }
  )
  mesh = make_test_mesh(*shape)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    state, losses, batch = program.init(), [], {}
    for seed in range(STEPS):
      rows = random_rows(cfg, cfg.data.batch_size, seed=seed)
      batch = to_global(micro_batches(rows, 1), mesh)
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      losses.append(float(metrics["train/loss"]))
    first = {name: x[0] for name, x in batch.items()}
    sums = program.eval_step(state.model, first, program.rules(1))
    read = lambda model, b: model.logits(
      model(
        b["tokens"],
        positions_BT=b["positions"],
        segment_ids_BT=b["segment_ids"],
        rules=program.rules(1),
      )[0]
    )
    arrays = named_leaves(state.model)
    weights = {name: np.asarray(x) for name, x in arrays.items()}
    cuts = {name: x.sharding.spec for name, x in arrays.items()}
    logits = np.asarray(jax.jit(read)(state.model, first))
  return np.array(losses), weights, cuts, np.asarray(sums), logits


@pytest.mark.mesh
def test_a_vocabulary_that_does_not_divide():
  vocab, shape = 65, (1, 2, 2)
  losses, weights, cuts, sums, logits = run(vocab, shape)
  wanted_losses, wanted, _, wanted_sums, wanted_logits = run(vocab, ONE)
  np.testing.assert_allclose(losses, wanted_losses, RTOL)
  np.testing.assert_allclose(sums, wanted_sums, RTOL)
  np.testing.assert_allclose(logits, wanted_logits, RTOL, 1e-5 * np.abs(wanted_logits).max())
  assert logits.shape[-1] == vocab
  for name, value in wanted.items():
    np.testing.assert_allclose(weights[name], value, RTOL, RTOL * np.abs(value).max(), err_msg=name)
  assert cuts[".embed.weight.value"] == jax.P(None, ZERO_AXES)
  assert weights[".embed.weight.value"].shape[0] == vocab
