"""On a GPU the orchestrator reads nothing from the device by accident."""

import jax
import numpy as np
import pytest
from helpers import counting_rows, make_test_mesh, micro_batches, tiny_config

from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.step.program import make_program

SETTINGS = {
  "num_steps": 60,
  "data.batch_size": 8,
  "orchestrator.mode": "act",
  "orchestrator.check_interval": 10,
  "orchestrator.snapshot_interval": 10,
}


def refuse(*args):
  raise AssertionError("the loop waits for the device")


@pytest.mark.gpu
def test_nothing_is_read_by_accident_and_nothing_between_looks(monkeypatch):
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(tiny_config(SETTINGS))
    state = program.init()
    supervisor = Supervisor(program, jax.device_put(counting_rows(10**6)))
    supervisor.start(0, state)
    batches = [jax.device_put(micro_batches(counting_rows(step), 1)) for step in range(61)]
    for step in range(1, 61):
      state, metrics = program.train_step(state, batches[step], program.training_rules(1))
      with monkeypatch.context() as patch, jax.transfer_guard_device_to_host("disallow"):
        if step % supervisor._cfg.check_interval:  # a copy is begun, and nobody waits for it
          patch.setattr(jax, "device_get", refuse)
        state = supervisor.after(step, state, metrics)
    with pytest.raises(jax.errors.JaxRuntimeError), jax.transfer_guard_device_to_host("disallow"):
      np.asarray(metrics.values + 1)  # the guard works here
    assert not supervisor.decisions
