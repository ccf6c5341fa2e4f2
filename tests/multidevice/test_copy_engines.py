"""Weights that go as copies from device to device: what is sent, and what is kept."""

from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, compiled_step
from equality import CFG, config_of, mesh_of
from helpers import tiny_config

from ats_jax.model.param import Role, params_of
from ats_jax.ops.attention.causal import attention
from ats_jax.ops.attention.ulysses import attend_by_heads
from ats_jax.planner.abstract import abstract_state, device_bytes
from ats_jax.planner.memory import activations
from ats_jax.sharding.mesh import make_mesh, on_mesh
from ats_jax.sharding.rules import use_plan

LAYERS, WAYS, MATRICES = 2, 4, 7
OF_TABLE = 64 * 32  # and of the head


@pytest.mark.mesh
def test_each_shard_is_sent_once_to_each_other_device():
  small = {"model.num_layers": LAYERS, "step.scan_unroll": LAYERS, "step.accum_steps": 1}
  small |= {"mesh.fsdp": WAYS, "mesh.copy_engines": True, "mesh.keep_gathered": True}
  cfg, mesh = tiny_config(CFG | small), mesh_of({"fsdp": WAYS})
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  number = Counter()
  for c in every:
    number[c.kind] += sum(len(a.shape) > 1 and a.dtype == "f32" for a in c.arrays)
  # Weights and gradients once; and the head and the table by collectives.
  assert number["collective-permute"] == 2 * MATRICES * LAYERS * (WAYS - 1)
  assert number["all-gather"] <= 2
  matrices = {a.size for c in every if c.kind == "all-gather" for a in c.arrays}
  assert matrices <= {OF_TABLE, 8 * 16}


def test_what_attention_swaps_goes_as_copies():
  """Between two devices each swap is one: of queries, keys, values and the output, each way."""
  ids = np.ones((2, 16), np.int32)

  def loss(q, k, v):
    y = attention(q, k, v, segment_ids_BT=ids, max_segments=1, along_row=attend_by_heads)
    return jnp.sum(y**2)

  with jax.set_mesh(mesh_of({"context": 2})), use_plan("default", copy_engines=True):
    x = jnp.ones((2, 16, 4, 8), out_sharding=jax.P(None, "context"))
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().as_text()
  sent = Counter(c.kind for c in collectives(text))
  assert (sent["all-to-all"], sent["collective-permute"]) == (0, 8)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_reverse_mode_keeps_shards_at_most(remat):
  """As by collectives: the backward pass gathers again, in a loop too."""
  sizes = {"fsdp": 2, "step.remat": remat}
  kept = []
  for copies in (False, True):
    cfg = config_of("dense", sizes | {"copy_engines": copies})
    with on_mesh(cfg, mesh_of(sizes)):
      state = abstract_state(cfg)
      kept.append(activations(cfg, state, 2))
      matrices = [p for p in params_of(state.model) if p.role is Role.MATRIX]
      shards = sum(map(device_bytes, matrices))
  assert 0 <= kept[1] - kept[0] <= (shards if remat == "none" else 0)


def test_copies_stay_in_one_process():
  devices = [SimpleNamespace(process_index=n) for n in range(2)]
  cfg = tiny_config({"mesh.fsdp": 2, "mesh.copy_engines": True})
  with pytest.raises(ValueError, match=r"of 2 processes: .* set mesh.copy_engines=false"):
    make_mesh(cfg, devices)
