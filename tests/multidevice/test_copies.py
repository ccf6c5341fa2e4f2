"""A device whose copy of the weights has another bit: the run goes back to before it."""

import dataclasses

import canonical
import jax
import numpy as np
from helpers import counting_rows, make_test_mesh, micro_batches, with_flipped_bit

from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.signals.copies import Copies
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.program import make_program

EVERY, FLIPPED = 4, 18
SETTINGS = {"orchestrator.check_interval": EVERY, "orchestrator.snapshot_interval": EVERY}
SETTINGS |= {"mesh.data": 4, "mesh.fsdp": 1}


def test_the_copy_of_one_device_is_named_and_taken_back(tmp_path):
  cfg, mesh = canonical.config("dense", canonical.SUPERVISED | SETTINGS), make_test_mesh(4, 1, 1)
  path = tmp_path / "decisions.jsonl"
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    state = program.init()
    supervisor = Supervisor(program, to_global(counting_rows(10**6), mesh), path)
    supervisor.start(0, state)
    for step in range(1, FLIPPED + 4 * EVERY):
      batch = to_global(micro_batches(counting_rows(step), 1), mesh)
      state, metrics = program.train_step(state, batch, program.training_rules(1))
      if step == FLIPPED:
        model = with_flipped_bit(state.model, "final_norm", mesh.devices.flat[2])
        state = dataclasses.replace(state, model=model)
      state = supervisor.after(step, state, metrics)
    supervisor.close()
    ((at, decision),) = supervisor.decisions
    assert (at, decision.action) == (24, Rollback())  # the look at step 20 began to compare
    assert f"copies of final_norm/scale are not equal: that of {mesh.devices.flat[2]}" in (
      decision.reason
    )
    shards = state.model.final_norm.scale[...].addressable_shards
    assert len({np.asarray(shard.data).tobytes() for shard in shards}) == 1
  assert ledger.replay(path) == supervisor.decisions


def test_copies_that_were_never_equal_are_no_fault():
  with jax.set_mesh(make_test_mesh(2, 1, 1)):
    copies = Copies(["embed", "head"])
  odd, equal = np.array([0, 2]), np.array([0, 0])
  found = [copies.faults(marks) for marks in (odd, odd, equal, odd, None)]
  assert [len(faults) for faults in found] == [0, 0, 0, 1, 0]
  assert found[3][0].reason.startswith("the copies of head are not equal: that of")
