import dataclasses

import pytest

from ats_jax.config import base_config, from_config_dict
from ats_jax.inference.load import fit_devices


def trained_on(data: int, fsdp: int, tensor: int, batch_size: int, accum_steps: int):
  config = base_config()
  config.mesh.update(data=data, fsdp=fsdp, tensor=tensor)
  config.data.batch_size = batch_size
  config.step.accum_steps = accum_steps
  return from_config_dict(config)


@pytest.mark.parametrize(
  ("trained", "devices", "fsdp", "tensor", "batch_size"),
  [
    ((1, 8, 1), 1, 1, 1, 8),
    ((2, 2, 2), 1, 1, 1, 8),
    ((2, 2, 2), 8, 2, 2, 8),
    ((1, 8, 1), 3, 1, 1, 9),
    ((1, 4, 2), 6, 1, 2, 9),
    ((1, 1, 4), 16, 1, 4, 8),
  ],
)
def test_any_run_fits_any_number_of_devices(trained, devices, fsdp, tensor, batch_size):
  cfg = trained_on(*trained, batch_size=16, accum_steps=2)
  fitted = fit_devices(cfg, devices)
  assert fitted.mesh == dataclasses.replace(cfg.mesh, data=-1, fsdp=fsdp, tensor=tensor)
  assert (fitted.data.batch_size, fitted.step.accum_steps) == (batch_size, 1)
  assert devices % (fsdp * tensor) == 0
  assert fitted.data.batch_size % (devices // tensor) == 0
