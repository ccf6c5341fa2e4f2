"""The parts of a batch: on another number of devices, and after memory ran out in a job."""

import dataclasses
import json

import jax
import pytest
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from ats_jax.config import Config
from ats_jax.train.resize import (
  RELIEF,
  resize_to_devices,
  smaller_micro_batch,
  with_smaller_micro_batch,
)


def config(batch: int = 12, accum_steps: int = 1, **mesh: int) -> Config:
  cfg = tiny_config({"data.batch_size": batch})
  step = dataclasses.replace(cfg.step, accum_steps=accum_steps)
  return dataclasses.replace(cfg, step=step, mesh=dataclasses.replace(cfg.mesh, **mesh))


@pytest.mark.parametrize(
  ("accum_steps", "devices", "now", "parts"),
  [
    (1, 4, 2, 2),  # half the devices: half the micro-batch, 3 rows on each
    (1, 4, 1, 4),
    (1, 2, 4, 1),
    (2, 1, 4, 1),  # 6 rows do not divide by 4; of 12 each has 3
    (2, 3, 2, 3),
    (4, 1, 2, 2),  # 3 rows do not divide by 2; 3 rows on each of two are in 2 parts of 6
  ],
)
def test_a_device_holds_no_more_rows_than_before(accum_steps, devices, now, parts):
  _, before = resize_to_devices(config(accum_steps=accum_steps), None, devices)
  cfg, after = resize_to_devices(config(accum_steps=accum_steps), before, now)
  assert cfg.step.accum_steps == parts
  assert after == before | {"count": now}
  assert (
    resize_to_devices(config(accum_steps=accum_steps), after, devices)[0].step.accum_steps
    == accum_steps
  )


@given(st.sampled_from([12, 24, 32, 60]), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_the_batch_stays_whole_or_is_refused(batch, devices, now, accum_steps):
  try:
    _, before = resize_to_devices(config(batch, accum_steps), None, devices)
  except ValueError:
    return  # would not have begun
  if batch % accum_steps:
    return
  try:
    cfg, after = resize_to_devices(config(batch, accum_steps), before, now)
  except ValueError as error:
    assert batch % now and f"cannot go on on {now}" in str(error)
    return
  assert batch % cfg.step.accum_steps == 0
  assert batch // cfg.step.accum_steps // now <= before["rows"] == after["rows"]


def test_a_number_that_the_user_has_changed_stands():
  _, before = resize_to_devices(config(accum_steps=1), None, 4)
  assert resize_to_devices(config(accum_steps=2), before, 2)[0].step.accum_steps == 2
  assert resize_to_devices(config(accum_steps=1), before, 4)[0].step.accum_steps == 1


def test_what_does_not_divide_is_refused_with_what_does():
  _, before = resize_to_devices(config(), None, 4)
  with pytest.raises(ValueError, match=r"on 4 devices .* on 8: .* 12 rows .* Use 1 or 2 or 3 or 4"):
    resize_to_devices(config(), before, 8)
  _, before = resize_to_devices(config(fsdp=2), None, 4)
  with pytest.raises(ValueError, match=r"on 3: .* Use 2 or 4 or 6 devices, or another mesh"):
    resize_to_devices(config(fsdp=2), before, 3)


def acting(cfg: Config) -> Config:
  return dataclasses.replace(cfg, orchestrator=dataclasses.replace(cfg.orchestrator, mode="act"))


OUT = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 34435140 bytes.")


def test_one_process_halves_its_micro_batch(tmp_path):
  assert smaller_micro_batch(acting(config(32)), tmp_path, OUT).step.accum_steps == 2
  assert not (tmp_path / RELIEF).exists()


@pytest.mark.parametrize(
  ("cfg", "error"),
  [
    (config(32), OUT),  # the orchestrator only looks on
    (acting(config(32, accum_steps=4)), OUT),  # a row for each of eight devices
    (acting(config(32)), jax.errors.JaxRuntimeError("INTERNAL: something else")),
  ],
)
def test_what_cannot_be_mended_is_raised(cfg, error, tmp_path):
  with pytest.raises(jax.errors.JaxRuntimeError) as raised:
    smaller_micro_batch(cfg, tmp_path, error)
  assert raised.value is error


@pytest.mark.parametrize(
  ("number", "own", "parts"),
  [(2, 1, 2), (2, 3, 3), (5, 1, 1)],  # the user asks for more; 32 rows have no five parts
)
def test_a_note_that_memory_ran_out_is_followed(number, own, parts, tmp_path):
  (tmp_path / RELIEF).write_text(json.dumps({"accum_steps": number}))
  assert with_smaller_micro_batch(config(32, accum_steps=own), tmp_path).step.accum_steps == parts


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"accum_steps": null}', "[" * 100_000])
def test_a_note_that_is_damaged_is_named(text, tmp_path):
  (tmp_path / RELIEF).write_text(text)
  with pytest.raises(ValueError, match=rf"{RELIEF} cannot be read: .*\. Delete it"):
    with_smaller_micro_batch(config(32), tmp_path)
