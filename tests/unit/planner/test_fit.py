"""`plan --fit`: what it picks fits, is fastest of what fits, and is explained."""

import dataclasses
import json
import math
import re

import pytest
from commands import forked
from helpers import tiny_config

from ats_jax.config.validate import validate
from ats_jax.planner.advice import fit_lines, memory_lines, memory_savings
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.fit import AXES, fit, meshes, remats, with_settings
from ats_jax.planner.hardware import COLLECTIVES, TYPICAL, Hardware, typical
from ats_jax.sharding.rules import MESH_AXES, ZERO_AXES

DENSE = {"model.vocab_size": 384, "model.num_layers": 4, "data.batch_size": 16, "data.seq_len": 32}
MOE = DENSE | {"moe.num_experts": 4, "moe.d_ff": 32}
RATES = Hardware(
  "test device",
  8,
  {"bfloat16": 1e12, "float32": 1e11},
  1e10,
  {name: [[2**10, 1e-5], [2**20, 1e-3]] for name in COLLECTIVES},
)


def test_a_mesh_without_tensor_shards_no_residuals():
  cfg = tiny_config(DENSE | {"mesh.tensor": 2, "mesh.shard_residuals": True})
  found = {(mesh["mesh.tensor"], mesh["mesh.shard_residuals"]) for mesh in meshes(cfg, 2)}
  assert found == {(1, False), (2, True)}
  assert fit(cfg, 2, 2**40, RATES).refused == {}


def test_a_mesh_without_context_has_no_ring():
  """And one with it is not limited by heads."""
  few = {"model.num_heads": 2, "model.num_kv_heads": 1, "data.batch_size": 4}
  cfg = tiny_config(DENSE | few | {"mesh.context": 4, "mesh.context_ring": True})
  found = {(mesh["mesh.context"], mesh["mesh.context_ring"]) for mesh in meshes(cfg, 4)}
  assert found == {(1, False), (2, True), (4, True)}
  for mesh in meshes(cfg, 4):
    if mesh["mesh.context"] == 4:
      validate(with_settings(cfg, mesh))


def test_gathered_weights_are_kept_where_a_run_takes_it():
  asked = {"mesh.keep_gathered": True, "mesh.copy_engines": True}
  cfg = tiny_config(DENSE | {"mesh.fsdp": 2} | asked)
  for mesh in meshes(cfg, 2):
    cut = max(mesh[f"mesh.{axis}"] for axis in ZERO_AXES) == 2
    shards = cut and mesh["mesh.zero"] == 3 and mesh["mesh.stage"] == 1
    assert mesh["mesh.keep_gathered"] == mesh["mesh.copy_engines"] == shards
  state = sum(fit(cfg, 2, 1000, RATES).plan["device_bytes_exact"].values())
  tried = fit(cfg, 2, state + 1000, RATES).considered  # more and more micro-batches
  assert len({c.settings["step.accum_steps"] for c in tried}) > 1
  for settings in (c.settings for c in tried):
    validate(with_settings(cfg, settings))
  looped = fit(with_settings(cfg, {"step.scan_unroll": 1}), 2, state + 1000, RATES).considered
  assert any(c.settings["mesh.keep_gathered"] for c in tried)
  assert not any(c.settings["mesh.keep_gathered"] for c in looped)  # a loop gathers in each pass


def test_gradients_are_compressed_where_a_run_takes_it():
  cfg = tiny_config(DENSE | {"mesh.data": 2, "mesh.compress_gradients": "fp8"})
  found = {
    tuple(mesh[f"mesh.{name}"] for name in ("data", "stage", "compress_gradients"))
    for mesh in meshes(cfg, 4)
  }
  assert found == {
    (1, 1, "none"), (1, 2, "none"), (1, 4, "none"), (2, 1, "fp8"), (2, 2, "none"), (4, 1, "fp8"),
  }  # fmt: skip


def every(cfg, devices):
  """All candidates by brute force: likely seconds, bytes, settings."""
  found = []
  for of_mesh in (mesh | remat for mesh in meshes(cfg, devices) for remat in remats(mesh)):
    for accum in (n for n in (1, 2, 4, 8, 16) if cfg.data.batch_size % n == 0):
      settings = of_mesh | {"step.accum_steps": accum}
      try:
        plan = describe(with_settings(cfg, settings), devices, RATES)
      except ValueError:
        continue
      found.append((plan["step_seconds"]["likely"], planned_bytes(plan), settings))
  return found


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("settings", "devices"),
  [
    (DENSE | {"data.batch_size": 2}, 2),
    pytest.param(MOE | {"data.batch_size": 4}, 2, marks=pytest.mark.slow),
  ],
)
@pytest.mark.slow
def test_the_pick_is_the_fastest_of_all_that_fit(settings, devices):
  cfg = tiny_config(settings)
  candidates = every(cfg, devices)
  sizes = sorted(size for _, size, _ in candidates)
  limits = [sizes[0], sizes[-1]]
  picks = []
  for limit in limits:
    found = fit(cfg, devices, limit, RATES)
    assert found.pick is not None and found.pick.fits
    fastest = min(seconds for seconds, size, _ in candidates if size <= limit)
    assert found.pick.seconds == pytest.approx(fastest)
    # The plan of the pick, asked for by itself, says the same.
    alone = describe(with_settings(cfg, found.pick.settings), devices, RATES)
    assert planned_bytes(alone) == found.pick.bytes <= limit
    assert alone == found.plan
    assert not any(c.fits for c in found.considered[:-1])
    picks.append(found.pick.settings)
  assert len({json.dumps(pick) for pick in picks}) == 2  # memory matters
  assert fit(cfg, devices, sizes[0] - 1, RATES).pick is None


@pytest.mark.thorough
def test_experts_get_no_axis_where_they_fit():
  cfg = tiny_config(MOE | {"model.num_heads": 3, "model.num_kv_heads": 3, "model.d_model": 24})
  copies = describe(with_settings(cfg, {"mesh.data": 2}), 2)
  found = fit(cfg, 2, sum(copies["device_bytes_exact"].values()), RATES)
  assert found.pick is not None
  assert found.pick.settings["mesh.fsdp"] == 2 and found.pick.settings["mesh.expert"] == 1
  text = "\n".join(fit_lines(found))
  assert "no expert axis: experts fit under fsdp" in text and "expert=2 " in text


def test_the_batch_and_what_is_not_searched_stay():
  cfg = tiny_config(DENSE)
  found = fit(cfg, 8, 2**40, RATES)
  kept = lambda c: dataclasses.replace(c, mesh=cfg.mesh, step=cfg.step)
  assert kept(found.cfg) == kept(cfg)
  rows = found.plan["run"]
  assert rows["rows_per_step"] == 16 and rows["devices"] == 8
  names = [f"mesh.{axis}" for axis in MESH_AXES]
  sizes = [math.prod(mesh[name] for name in names) for mesh in meshes(cfg, 8)]
  assert set(sizes) == {8} and len(sizes) > 8
  assert {"data", *(axis.name for axis in AXES)} == set(MESH_AXES)


def test_a_pipeline_is_picked_where_links_are_slow():
  """Its weights stay where they are; more micro-batches than stages make the bubble smaller.

  Twice as many would move the weights' gradients twice as often.
  """
  slow = {name: [[2**10, 1e-7], [2**20, 0.1]] for name in COLLECTIVES}
  rates = dataclasses.replace(RATES, matmul_flops={"float32": 1e10}, collectives=slow)
  found = fit(tiny_config(DENSE | {"data.seq_len": 8, "model.num_layers": 16}), 2, 2**40, rates)
  assert found.pick is not None
  assert found.pick.settings["mesh.stage"] == 2 and found.pick.settings["step.accum_steps"] == 8
  assert found.pick.mesh == "stage=2"


def test_a_row_is_cut_where_there_is_one():
  one_row = {"data.batch_size": 1, "model.num_kv_heads": 1}
  found = fit(tiny_config(DENSE | one_row), 2, 2**40, RATES)
  assert found.pick is not None and found.pick.mesh == "context=2, zero=2"  # nothing is gathered
  assert {"data=2", "stage=2", "fsdp=2"} <= found.refused.keys()
  assert "step.accum_steps=2 does not divide data.batch_size=1" in found.refused["stage=2"]
  # Three heads are no whole number for two devices.
  heads = {"model.num_heads": 3, "model.num_kv_heads": 3, "model.d_model": 24}
  found = fit(tiny_config(DENSE | heads), 2, 2**40, RATES)
  assert "mesh.context=2 x mesh.tensor=1 does not divide" in found.refused["context=2"]


def test_what_is_not_possible_is_said():
  cfg = tiny_config(DENSE | {"model.num_heads": 4, "model.num_kv_heads": 4, "model.d_ff": 62})
  found = fit(cfg, 4, 2**40, RATES)
  assert all("tensor=4" in name for name in found.refused)
  assert "mesh.tensor=4 does not divide model.d_ff=62" in "\n".join(fit_lines(found))
  with pytest.raises(ValueError, match=r"no mesh of 7 devices is possible: .*16 rows"):
    fit(tiny_config(DENSE | {"model.d_model": 32}), 7, 2**40, RATES)


def test_nothing_fits():
  cfg = tiny_config(DENSE)
  found = fit(cfg, 2, 1000, RATES)
  assert found.pick is None
  text = "\n".join(fit_lines(found))
  assert re.search(
    r"nothing fits\. The smallest plan:\n  fsdp=2, step.remat=full, .*_steps=8", text
  )
  assert "one row does not fit beside any state" in text
  state = sum(found.plan["device_bytes_exact"].values())
  more = planned_bytes(found.plan) - state + state // 4
  text = "\n".join(fit_lines(fit(cfg, 2, more, RATES)))
  assert re.search(r"the state needs about (8|9) devices", text)


@pytest.mark.thorough
def test_what_would_help_is_said_in_settings():
  cfg = tiny_config(DENSE)
  plan = describe(cfg, 4)
  used = planned_bytes(plan)
  assert memory_lines(cfg, 4, plan, used)[0].startswith("fits: ")
  helps = {json.dumps(relief.settings): relief.bytes for relief in memory_savings(cfg, 4, plan)}
  assert helps[json.dumps({"mesh.data": 1, "mesh.fsdp": 4})] < used
  assert helps[json.dumps({"step.remat": "full"})] < used
  for text, size in helps.items():
    nested = json.loads(text)
    assert size == planned_bytes(describe(tiny_config(DENSE | nested), 4))
  lines = memory_lines(cfg, 4, plan, min(helps.values()))
  assert lines[0].startswith("does not fit: ") and "largest parts" in lines[1]
  assert sum(line.endswith("  fits") for line in lines) == 1
  assert lines[3].endswith("  fits")  # the smallest first
  assert "none of it alone" in memory_lines(cfg, 4, plan, 1)[-1]


def test_typical_rates():
  for name, row in TYPICAL.items():
    rates = typical(name)
    assert rates.matmul_flops["bfloat16"] == row.matmul * 1e12 and rates.device_kind == row.kind
    gathered = rates.seconds("all_gather", 2**30, 8)
    assert gathered == pytest.approx(2**30 * 7 / 8 / (row.link * 1e9), rel=0.03)
    assert rates.seconds("all_reduce", 2**30, 8) == pytest.approx(2 * gathered, rel=0.02)
  with pytest.raises(ValueError, match=r"--device=TPU: typical rates are known of .*H100"):
    typical("TPU")


def test_the_command():
  arguments = "ats_jax", "plan", "--config=configs/debug.py", "--fit"
  tiny = "--config.model.num_layers=2"
  told = forked(*arguments, "--devices=2", tiny, "--memory=1")
  assert "picked: " in told.out and "--config.mesh.fsdp=" in told.out
  picked = re.search(
    r"^  (--config\.mesh\.data.*) \\\n  (--config\.step.*)$", told.out, re.MULTILINE
  )
  assert picked is not None
  again = forked(
    "ats_jax",
    "plan",
    "--config=configs/debug.py",
    tiny,
    "--memory=1",
    *picked[1].split(),
    *picked[2].split(),
  )
  assert "fits: " in again.out
  assert "--fit needs --devices" in forked(*arguments).error()
  assert "nothing fits 2 devices" in forked(*arguments, "--devices=2", "--memory=0.001").error()
  found = json.loads(forked(*arguments, "--devices=2", tiny, "--json").out)
  assert found["pick"]["fits"] and found["plan"]["run"]["devices"] == 2
