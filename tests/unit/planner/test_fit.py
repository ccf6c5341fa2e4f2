"""`plan --fit`: what it picks fits, is fastest of what fits, and is explained."""

import contextlib
import dataclasses
import functools
import json
import math
import re

import pytest
from helpers import tiny_config
from in_process import printed_by

from ats_jax.config.validate import validate
from ats_jax.metrics.peaks import peak_flops
from ats_jax.planner import advice
from ats_jax.planner import fit as fit_module
from ats_jax.planner.advice import fit_lines, memory_lines, memory_savings
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.fit import AXES, fit, meshes, remats, with_settings
from ats_jax.planner.hardware import (
  COLLECTIVES,
  TYPICAL,
  Hardware,
  typical,
  with_format_of,
  with_kernels_of,
)
from ats_jax.sharding.rules import MESH_AXES, ZERO_AXES

# With XLA's attention an estimate takes one trace of the step in place of two.
DENSE = {
  "model.vocab_size": 384,
  "model.num_layers": 4,
  "data.batch_size": 16,
  "data.seq_len": 32,
  "ops.kernels": {"attention": "xla"},
}
# Three heads and one layer: of two devices only `data` and `fsdp` are possible.
NARROW = DENSE | {
  "model.num_layers": 1,
  "model.num_heads": 3,
  "model.num_kv_heads": 3,
  "model.d_model": 24,
  "data.batch_size": 4,
}
RATES = Hardware(
  "test device",
  8,
  {"bfloat16": 1e12, "float32": 1e11},
  1e10,
  {name: [[2**10, 1e-5], [2**20, 1e-3]] for name in COLLECTIVES},
)


@pytest.fixture(autouse=True)
def few_policies(monkeypatch):
  """The extremes of remat alone, so that fewer steps are traced."""
  for module in (fit_module, advice):
    monkeypatch.setattr(module, "REMATS", ("none", "full"))
  monkeypatch.setattr(fit_module, "STAGE_REMATS", ("dots",))


def every_mesh(settings, devices, *names):
  """The sizes and values that the meshes of a config have, each of which a run takes."""
  cfg = tiny_config(DENSE | settings)
  found = set()
  for mesh in meshes(cfg, devices):
    staged = {"step.accum_steps": mesh["mesh.stage"]}
    validate(with_settings(cfg, mesh | staged))
    found.add(tuple(mesh[f"mesh.{name}"] for name in names))
  return found


def test_meshes_have_what_a_run_takes():
  """Settings that are refused on a mesh, where they do nothing, are off there."""
  sent = {"mesh.data": 2, "mesh.compress_gradients": "fp8"}
  assert every_mesh(sent, 4, "data", "stage", "compress_gradients") == {
    (1, 1, "none"), (1, 2, "none"), (1, 4, "none"), (2, 1, "fp8"), (2, 2, "none"), (4, 1, "fp8"),
  }  # fmt: skip
  copied = {"mesh.fsdp": 2, "mesh.copy_engines": True}
  names = ("keep_gathered", "copy_engines", "zero", "stage", *ZERO_AXES)
  found = every_mesh(copied, 2, *names)
  for kept, copies, zero, stage, *axes in found:
    assert copies == (max(axes) == 2 and zero == 3 and stage == 1)
    other = (not kept, copies, zero, stage, *axes)
    assert (other in found) == copies  # weights that are gathered are kept, or are not


def test_every_split_of_the_devices_is_a_mesh():
  names = [f"mesh.{axis}" for axis in MESH_AXES]
  sizes = [math.prod(mesh[name] for name in names) for mesh in meshes(tiny_config(DENSE), 8)]
  assert set(sizes) == {8} and len(sizes) > 8
  assert {"data", *(axis.name for axis in AXES)} == set(MESH_AXES)


@pytest.mark.thorough
def test_gathered_weights_are_kept_where_a_run_takes_it():
  cfg = tiny_config(NARROW | {"model.num_layers": 3, "mesh.fsdp": 2})
  tried = fit(cfg, 2, 1000, RATES).considered
  assert any(c.settings["mesh.keep_gathered"] for c in tried)
  for settings in (c.settings for c in tried):
    validate(with_settings(cfg, settings))
  looped = fit(with_settings(cfg, {"step.scan_unroll": 1}), 2, 1000, RATES).considered
  assert not any(c.settings["mesh.keep_gathered"] for c in looped)  # a loop gathers in each pass


@pytest.mark.thorough
def test_the_pick_is_the_fastest_of_all_that_fit():
  """Copies, shards in three stages of ZeRO and a pipeline, each with three ways to recompute."""
  # Rows are long, since estimates from scaled activations are off by some weights.
  long = {"model.num_layers": 2, "data.batch_size": 2, "data.seq_len": 256}
  cfg, candidates = tiny_config(NARROW | long), []
  for settings in (mesh | remat for mesh in meshes(cfg, 2) for remat in remats(mesh)):
    settings |= {"step.accum_steps": settings["mesh.stage"]}
    with contextlib.suppress(ValueError):  # a mesh that is not possible
      plan = describe(with_settings(cfg, settings), 2, RATES)
      candidates.append((plan["step_seconds"]["likely"], planned_bytes(plan)))
  sizes = sorted(size for _, size in candidates)
  picks = []
  for limit in (sizes[0], sizes[-1]):
    found = fit(cfg, 2, limit, RATES)
    assert found.pick is not None and found.pick.fits
    fastest = min(seconds for seconds, size in candidates if size <= limit)
    assert found.pick.seconds == pytest.approx(fastest)
    # The plan of the pick, asked for by itself, says the same.
    alone = describe(with_settings(cfg, found.pick.settings), 2, RATES)
    assert planned_bytes(alone) == found.pick.bytes <= limit
    assert alone == found.plan
    assert not any(c.fits for c in found.considered[:-1])
    picks.append(found.pick.settings)
  assert picks[0] != picks[1]  # memory matters
  assert fit(cfg, 2, sizes[0] - 1, RATES).pick is None


@pytest.mark.thorough
def test_experts_get_no_axis_where_they_fit(monkeypatch):
  monkeypatch.setattr(fit_module, "REMATS", ("full",))
  monkeypatch.setattr(fit_module, "ZERO_STAGES", (3,))
  experts = {"moe.num_experts": 2, "moe.top_k": 1, "moe.d_ff": 32, "data.batch_size": 2}
  cfg = tiny_config(NARROW | experts)
  folded = {"mesh.data": 1, "mesh.fsdp": 2, "step.remat": "full"}
  found = fit(cfg, 2, planned_bytes(describe(with_settings(cfg, folded), 2)), RATES)
  assert found.pick is not None
  assert found.pick.settings["mesh.fsdp"] == 2 and found.pick.settings["mesh.expert"] == 1
  text = "\n".join(fit_lines(found))
  assert "no expert axis: experts fit under fsdp" in text and "expert=2 " in text


@pytest.mark.thorough
def test_a_pipeline_is_picked_where_links_are_slow():
  """Its weights stay where they are; more micro-batches than stages make the bubble smaller."""
  slow = {name: [[2**10, 1e-7], [2**20, 0.1]] for name in COLLECTIVES}
  rates = dataclasses.replace(RATES, matmul_flops={"float32": 1e10}, collectives=slow)
  deep = {"model.num_layers": 16, "data.batch_size": 16, "data.seq_len": 8}
  found = fit(tiny_config(NARROW | deep), 2, 2**40, rates)
  assert found.pick is not None
  assert found.pick.settings["mesh.stage"] == 2 and found.pick.settings["step.accum_steps"] > 2
  assert found.pick.mesh == "stage=2"


@pytest.mark.thorough
def test_a_row_is_cut_where_there_is_one(monkeypatch):
  monkeypatch.setattr(fit_module, "REMATS", ("full",))
  one_row = {"data.batch_size": 1, "model.num_kv_heads": 1, "model.num_layers": 2}
  found = fit(tiny_config(DENSE | one_row), 2, 2**40, RATES)
  assert found.pick is not None and found.pick.mesh == "context=2, keep_gathered"
  assert {"data=2", "stage=2", "fsdp=2"} <= found.refused.keys()
  assert "step.accum_steps=2 does not divide data.batch_size=1" in found.refused["stage=2"]


def test_what_is_not_searched_stays_and_what_is_not_possible_is_said():
  cfg = tiny_config(NARROW)
  found = fit(cfg, 2, 2**40, RATES)
  kept = lambda c: dataclasses.replace(c, mesh=cfg.mesh, step=cfg.step)
  assert kept(found.cfg) == kept(cfg)
  assert (found.plan["run"]["rows_per_step"], found.plan["run"]["devices"]) == (4, 2)
  # Three heads are no whole number for two devices.
  assert "mesh.context=2 x mesh.tensor=1 does not divide" in found.refused["context=2"]
  assert "mesh.context=2 x mesh.tensor=1 does not divide" in "\n".join(fit_lines(found))
  with pytest.raises(ValueError, match=r"no mesh of 7 devices is possible: .*16 rows"):
    fit(tiny_config(DENSE | {"model.d_model": 32}), 7, 2**40, RATES)


def test_nothing_fits():
  found = fit(tiny_config(NARROW), 2, 1000, RATES)
  assert found.pick is None
  text = "\n".join(fit_lines(found))
  assert re.search(
    r"nothing fits\. The smallest plan:\n  fsdp=2, step.remat=full, .*_steps=2", text
  )
  assert "one row does not fit beside any state" in text
  state = sum(found.plan["device_bytes_exact"].values())
  room = planned_bytes(found.plan) - state + state // 4
  text = "\n".join(fit_lines(found._replace(limit=room)))
  assert re.search(r"the state needs about (8|9) devices", text)


@pytest.mark.thorough
def test_what_would_help_is_said_in_settings(monkeypatch):
  monkeypatch.setattr(advice, "describe", functools.cache(describe))  # asked for twice
  deep = NARROW | {"model.num_layers": 3}
  cfg = tiny_config(deep)
  plan = describe(cfg, 2)
  used = planned_bytes(plan)
  assert memory_lines(cfg, 2, plan, used)[0].startswith("fits: ")
  helps = {json.dumps(relief.settings): relief.bytes for relief in memory_savings(cfg, 2, plan)}
  assert max(helps.values()) < used
  for settings in ({"mesh.data": 1, "mesh.fsdp": 2}, {"step.remat": "full"}):
    assert helps[json.dumps(settings)] == planned_bytes(describe(tiny_config(deep | settings), 2))
  lines = memory_lines(cfg, 2, plan, min(helps.values()))
  assert lines[0].startswith("does not fit: ") and "largest parts" in lines[1]
  assert sum(line.endswith("  fits") for line in lines) == 1
  assert lines[3].endswith("  fits")  # the smallest first


def test_typical_rates():
  for name, row in TYPICAL.items():
    rates = typical(name)
    dtype = "bfloat16" if row.bfloat16 else "float16"
    assert rates.matmul_flops[dtype] == row.matmul * 1e12 and rates.device_kind == row.kind
    assert ("bfloat16" in rates.matmul_flops) == row.bfloat16
    # The share of the data sheet's figures, where the table of peaks has them.
    if peak := peak_flops(row.kind, dtype):
      assert row.matmul == pytest.approx(0.75 * peak / 1e12, abs=3)
    asked = tiny_config()
    asked = dataclasses.replace(
      asked, precision=dataclasses.replace(asked.precision, compute_dtype="auto")
    )
    assert with_format_of(asked, row.kind).precision.compute_dtype == dtype
    named = {} if row.bfloat16 else {"attention": "chunked"}
    long = dataclasses.replace(asked, data=dataclasses.replace(asked.data, seq_len=2048))
    assert with_kernels_of(long, row.kind).ops.kernels == named
    assert with_kernels_of(asked, row.kind) == asked  # short rows have all scores at once
    experts = with_kernels_of(tiny_config({"moe.num_experts": 4}), row.kind).ops.kernels
    assert experts == ({} if name in ("H100", "H200", "T4") else {"grouped_matmul": "triton"})
    gathered = rates.seconds("all_gather", 2**30, 8)
    assert gathered == pytest.approx(2**30 * 7 / 8 / (row.link * 1e9), rel=0.03)
    assert rates.seconds("all_reduce", 2**30, 8) == pytest.approx(2 * gathered, rel=0.02)
  assert typical("T4").matmul_flops["float32"] < typical("T4").matmul_flops["float16"] / 7
  with pytest.raises(ValueError, match=r"--device=TPU: typical rates are known of .*H100"):
    typical("TPU")


def test_the_command(monkeypatch, capsys):
  monkeypatch.setattr(fit_module, "REMATS", ("full",))
  config = ("--config=configs/debug.py", "--devices=2", "--config.model.num_layers=1")
  config += ("--config.model.num_heads=1", "--config.model.num_kv_heads=1")
  told = printed_by("plan", *config, "--fit", "--memory=1")
  assert "picked: " in told and "--config.mesh.fsdp=" in told
  picked = re.search(r"^  (--config\.mesh\.data.*) \\\n  (--config\.step.*)$", told, re.MULTILINE)
  assert picked is not None
  again = printed_by("plan", *config, "--memory=1", *picked[1].split(), *picked[2].split())
  assert "fits: " in again
  with pytest.raises(ValueError, match="--fit needs --devices"):
    printed_by("plan", "--config=configs/debug.py", "--fit")
  with pytest.raises(ValueError, match="nothing fits 2 devices"):
    printed_by("plan", *config, "--fit", "--json", "--memory=0.001")
  found = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert found["pick"] is None and found["plan"]["run"]["devices"] == 2
