"""The baseline of the speed ratios is the same model: its losses are those of the train step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.data.batch import random_batch
from ats_jax.sharding.mesh import to_global
from ats_jax.step.program import make_program
from lab.plain_decoder import check, first_state, init, make_step

pytestmark = pytest.mark.thorough

STEPS = 3
EXPERTS = {
  "model.num_layers": 1,
  "data.max_segments": 1,
  "optimizer.schedule": "constant",
  "optimizer.weight_decay": 0.0,  # the plain step decays norms and embeddings too
  "step.loss_chunk_tokens": 32,
  "step.remat": "full",
  "moe.num_experts": 4,
  "moe.aux_loss": 0.0,
  "moe.z_loss": 0.0,
  "moe.bias_update": "none",
}


def plain_parameters(model) -> dict:
  """The weights of a decoder of one kind of layer, named as the plain step names them."""
  (stack,) = model.segments
  (layer,) = stack.layers
  flat = lambda w, lead: w.reshape(*w.shape[:lead], -1)
  attn, mlp = layer.attn, layer.mlp
  q, k, v = (np.asarray(m.weight[...]) for m in (attn.q, attn.k, attn.v))
  out = np.asarray(attn.out.weight[...])
  gate, up = (np.asarray(m.weight[...]) for m in (mlp.gate, mlp.up))
  blocks = {
    "attn_norm": layer.attn_norm.scale[...],
    "mlp_norm": layer.mlp_norm.scale[...],
    "q": flat(q, 2),
    "kv": np.concatenate([flat(k, 2), flat(v, 2)], axis=-1),
    "out": out.reshape(out.shape[0], -1, out.shape[-1]),
    "gate_up": np.concatenate([gate, up], axis=-1),
    "down": mlp.down.weight[...],
  }
  if hasattr(mlp, "router"):
    blocks["router"] = mlp.router.weight[...]
  params = {
    "embed": model.embed.weight[...],
    "blocks": blocks,
    "norm": model.final_norm.scale[...],
    "head": np.asarray(model.head.weight[...]).T,
  }
  return jax.tree.map(np.array, params)  # copies: the train step takes the arrays


def test_three_updates_have_the_losses_of_the_train_step():
  cfg = tiny_config(EXPERTS)
  check(cfg)
  rows = random_batch((1, cfg.data.batch_size, cfg.data.seq_len), cfg.model.vocab_size)
  mesh = make_test_mesh(1, 1, 1)
  with jax.set_mesh(mesh):
    program = make_program(cfg)
    state, batch = program.init(), to_global(rows, mesh)
    params = plain_parameters(state.model)
    want = []
    for _ in range(STEPS):
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      want.append(float(metrics["train/loss"]))
  shapes = jax.eval_shape(lambda key: init(cfg, key), jax.random.key(0))
  assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
  step, plain, got = make_step(cfg), first_state(cfg, jax.tree.map(jnp.asarray, params)), []
  tokens, targets = jnp.asarray(rows["tokens"][0]), jnp.asarray(rows["targets"][0])
  for _ in range(STEPS):
    *plain, loss, _ = step(*plain, tokens, targets)
    got.append(float(loss))
  assert want[-1] < want[0] - 0.01  # the updates count
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_the_plain_step_does_not_compute_is_refused():
  with pytest.raises(ValueError, match=r"step\.accum_steps=2: the plain step has only"):
    check(tiny_config({"step.accum_steps": 2}))
  with pytest.raises(ValueError, match=r"'names': the plain step has 'full' and 'dots'"):
    check(tiny_config({"step.remat": "names"}))
