"""Weights that go as copies from device to device: what is sent, and what is kept."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from collectives import collectives, compiled_step
from equality import CFG, RTOL, config_of, mesh_of, run
from helpers import tiny_config

from ats_jax.model.param import Role, params_of
from ats_jax.planner.abstract import abstract_state, device_bytes
from ats_jax.planner.memory import activations
from ats_jax.sharding.mesh import make_mesh, on_mesh


@pytest.mark.mesh
def test_copies_have_the_values_of_collectives_in_8_bits():
  """Where one device rounds otherwise."""
  sizes = ("fsdp", 2), ("precision.fp8", True), ("precision.fp8_keep_first", 0)
  copied, gathered = run("dense", *sizes, ("copy_engines", True)), run("dense", *sizes)
  np.testing.assert_allclose(copied.losses, gathered.losses, rtol=RTOL)


LAYERS, WAYS, MATRICES = 2, 4, 7
OF_TABLE = 64 * 32  # and of the head


@pytest.mark.parametrize(
  ("keep", "times"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.mesh)]
)
def test_each_shard_is_sent_once_a_pass_to_each_other_device(keep, times):
  small = {"model.num_layers": LAYERS, "step.scan_unroll": LAYERS, "step.accum_steps": 1}
  small |= {"mesh.fsdp": WAYS, "mesh.copy_engines": True, "mesh.keep_gathered": keep}
  cfg, mesh = tiny_config(CFG | small), mesh_of({"fsdp": WAYS})
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  number = Counter({kind: 0 for kind in ("collective-permute", "all-gather")})
  for c in every:
    number[c.kind] += sum(len(a.shape) > 1 and a.dtype == "f32" for a in c.arrays)
  # Gradients once; and the head and the table by collectives.
  assert number["collective-permute"] == (times + 1) * MATRICES * LAYERS * (WAYS - 1)
  assert number["all-gather"] <= 2
  matrices = {a.size for c in every if c.kind == "all-gather" for a in c.arrays}
  assert matrices <= {OF_TABLE, 8 * 16}


@pytest.mark.mesh
def test_what_attention_swaps_goes_as_copies():
  """Between two devices each swap is one; what remat does not keep is swapped again."""
  sizes, sent = {"context": 2}, {}
  for remat in ("none", "qkv"):
    cfg = config_of("dense", sizes | {"step.remat": remat, "copy_engines": True})
    with on_mesh(cfg, mesh_of(sizes)):
      every = collectives(compiled_step(cfg, mesh_of(sizes)).as_text())
    in_loop = Counter(c.kind for c in every if c.in_loop == max(c.in_loop for c in every))
    assert in_loop["all-to-all"] == 0
    sent[remat] = in_loop["collective-permute"]
  assert sent["none"] >= 8
  assert sent["qkv"] == sent["none"] + 1


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
