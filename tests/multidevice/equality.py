"""Steps on a mesh compared with those of one device, for several kinds of models."""

import functools
import re
from typing import Any, NamedTuple

import numpy as np
from helpers import make_test_mesh, micro_batches, named_leaves, random_rows, tiny_config

from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.sharding.rules import MESH_AXES
from ats_jax.step.program import make_program

RTOL = 1e-5  # and of the largest element of a tensor a tenth of that
FLIPPED = 1e-3  # of a loss, where a token of a hundred goes to another expert or depth
ROWS, ACCUM, STEPS = 8, 2, 2
CFG = {
  "data.batch_size": ROWS,
  "step.accum_steps": ACCUM,
  "step.z_loss": 1e-3,
  "step.remat": "names",
  "optimizer.grad_clip": 0.0,
  # With its small one Adam makes steps of rounded gradients that move a token to another expert.
  "optimizer.eps": 1e-3,
  "orchestrator.mode": "off",
}
MOE = {
  "moe.num_experts": 4,
  "moe.d_ff": 32,
  "moe.num_shared": 1,
  "moe.aux_loss": 0.3,
  "moe.sequence_aux_loss": 0.2,
  "moe.z_loss": 0.1,
}
# Five places of 16 positions: no context divides them. Scores that rounding does not swap.
MOD = {
  "mod.routing": "learned",
  "mod.capacity": 0.3,
  "mod.every": 1,
  "mod.decision": "predictor",
  "model.init_std": 0.3,
}
KINDS = {
  "dense": {"model.dropout": 0.1, "model.window": 6, "model.attn_sinks": True},
  # A vocabulary that no mesh divides.
  "latent": {
    "model.dropout": 0.1,
    "model.kv_latent_dim": 16,
    "model.latent_rope_dim": 4,
    "model.num_kv_heads": 4,
    "model.vocab_size": 65,
    "model.tie_embeddings": True,
    "precision.deterministic": True,
    "step.label_smoothing": 0.1,  # divides by the size of the vocabulary
  },
  "capacity": MOE | {"model.num_layers": 4, "moe.dispatch": "capacity", "moe.noise": 0.3},
  "hybrid": MOD | MOE,
}
# Nothing in it is random: rows in one micro-batch give what they give in several.
WHOLE = "hybrid"


class Run(NamedTuple):
  losses: np.ndarray
  grads: dict[str, np.ndarray]
  layers: dict[str, np.ndarray]  # metrics of sparse layers
  buffers: dict[str, np.ndarray]
  scores: np.ndarray
  shardings: list[dict[str, Any]]
  shards: dict[str, tuple[int, ...]]  # of the state

  def of_model(self):
    return {k: s for k, s in self.shardings[0].items() if k.startswith(".model")}


def of_all_layers(leaves: dict[str, Any]) -> dict[str, np.ndarray]:
  """Arrays by name; those of the rounds of a pipeline as those of one stack."""
  found: dict[str, list[np.ndarray]] = {}
  for name, value in leaves.items():
    found.setdefault(re.sub(r"segments\[\d+\]", "segments[0]", name), []).append(np.asarray(value))
  return {name: np.concatenate(v) if len(v) > 1 else v[0] for name, v in found.items()}


def mesh_of(sizes):
  axes = {axis: n for axis, n in sizes.items() if axis in MESH_AXES}
  return make_test_mesh(**({"data": 1, "fsdp": 1, "tensor": 1} | axes))


def config_of(kind, sizes, changes=()):
  of_mesh = {n if "." in n else f"mesh.{n}": value for n, value in sizes.items()}
  return tiny_config(CFG | KINDS[kind] | of_mesh | dict(changes))


@functools.cache
def run(kind: str, *sizes: tuple[str, int]) -> Run:
  """Some steps, and the gradient of the first one, on a mesh of these sizes; others of `mesh`.

  Names with a dot are settings of other sections. The step is compiled ahead: it refuses a state
  that lies otherwise than the first one does.
  """
  cfg, mesh = config_of(kind, dict(sizes)), mesh_of(dict(sizes))
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    state, rules = program.init(), program.training_rules(1)
    shardings = [{k: v.sharding for k, v in named_leaves(state).items()}]
    shards = {k: v.addressable_shards[0].data.shape for k, v in named_leaves(state).items()}
    rows = [random_rows(cfg, ROWS, seed=s) for s in range(STEPS)]
    batches = [to_global(micro_batches(r, cfg.step.accum_steps), mesh) for r in rows]
    step = program.train_step.lower(state, batches[0], rules).compile()
    losses, grads, layers = [], {}, {}
    for batch in batches:
      state, metrics = step(state, batch)
      losses.append(float(metrics["train/loss"]))
      if not grads:  # after one update the first moment is (1 - b1) times the gradient
        mu = named_leaves(state.opt_state[0].mu)
        grads = {k: v / (1 - cfg.optimizer.b1) for k, v in of_all_layers(mu).items()}
        layers = {k: np.asarray(v) for k, v in named_leaves(metrics.layers).items()}
        buffers = {k: v for k, v in named_leaves(state.model).items() if "_E" in k}
        buffers = of_all_layers(buffers)
    shardings.append({k: v.sharding for k, v in named_leaves(state).items()})
    batch = to_global({k: v[: ROWS // ACCUM] for k, v in rows[0].items()}, mesh)
    scores = np.asarray(program.eval_step(state.weights, batch, program.rules(1)))
    return Run(np.array(losses), grads, layers, buffers, scores, shardings, shards)


def assert_equal(many: Run, one: Run, *, of_largest: float = RTOL / 5):
  """But for sums of another order, in relation to the largest element of a tensor."""

  def close(got, want, name):
    np.testing.assert_allclose(got, want, RTOL, of_largest * np.abs(want).max(), err_msg=name)

  close(many.losses[0], one.losses[0], "the first loss")
  # From the second step on a rounding may decide where a token goes (seen on one kind of CPU).
  later = FLIPPED if many.layers else RTOL
  np.testing.assert_allclose(many.losses[1:], one.losses[1:], later, err_msg="losses")
  np.testing.assert_allclose(many.scores, one.scores, later, err_msg="scores")
  assert len(set(one.losses.tolist())) == STEPS  # there is something to compare
  for part in ("grads", "layers", "buffers"):
    got, want = getattr(many, part), getattr(one, part)
    assert got.keys() == want.keys()
    for name, value in want.items():
      close(got[name], value, name)
  assert all(np.abs(g).max() > 1e-5 for g in one.grads.values())


def assert_lies_still(many: Run):
  """States lie as the first one does; moments as their weights, where these are sharded."""
  assert many.shardings[0] == many.shardings[1]
  for name, sharding in many.of_model().items():
    copies = [
      s
      for k, s in many.shardings[0].items()
      if k.endswith(name.removeprefix(".model")) and "opt_state" in k
    ]
    assert set(copies) <= {sharding}, name
