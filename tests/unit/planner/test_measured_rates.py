"""Measured rates: their file, and what the time of a step does when rates, mesh or remat change."""

import dataclasses
import functools
import json

import pytest
from helpers import tiny_config

from ats_jax.cluster.preflight import measure
from ats_jax.model.count import count
from ats_jax.planner.abstract import abstract_mesh, abstract_state, device_bytes
from ats_jax.planner.hardware import COLLECTIVES, Hardware, typical
from ats_jax.planner.memory import state_memory
from ats_jax.planner.seconds import (
  GATHERED_PASSES,
  PLACED_PASSES,
  render_seconds,
  step_seconds,
)
from ats_jax.sharding.mesh import on_mesh
from lab import planned_times

KIB = 2**10
RATES = Hardware(
  "test device",
  4,
  {"bfloat16": 1e12, "float32": 1e11},
  1e10,
  {name: [[1 * KIB, 0.001], [4 * KIB, 0.002]] for name in COLLECTIVES},
)
EXPERTS = {"moe.num_experts": 4, "moe.top_k": 2, "moe.d_ff": 32, "moe.every": 2}


def test_seconds_of_a_collective():
  at = lambda kib, ways=4: RATES.seconds("all_gather", kib * KIB, ways)
  assert at(1) == pytest.approx(0.001) and at(4) == pytest.approx(0.002)
  assert at(2.5) == pytest.approx(0.0015)  # between them
  assert at(0.01) == pytest.approx(0.001)  # the time to begin
  assert at(40) == pytest.approx(0.02)  # the bandwidth of the largest
  assert at(4, 2) == pytest.approx(0.002 * (1 / 2) / (3 / 4))  # half of an array travels
  assert at(4, 1) == 0 == RATES.seconds("all_gather", 0, 4)
  alone = dataclasses.replace(RATES, devices=1, collectives={})
  assert alone.seconds("all_gather", KIB, 4) is None


def test_the_text_says_whether_rates_were_measured():
  times = {"parts": {}, "least": 1.0, "likely": 1.0, "most": 1.0, "device_kind": "a GPU"}
  first_line = lambda devices: render_seconds(times | {"measured_devices": devices}, 1)[0]
  assert first_line(4) == "a step, from rates measured on 4 x a GPU"
  assert first_line(0) == "a step, from typical rates of a GPU"
  assert typical("H100").is_typical and not RATES.is_typical


def test_the_file(tmp_path):
  path = tmp_path / "folder" / "hardware.json"
  with pytest.raises(ValueError, match=r"there is no .*check_env --measure"):
    Hardware.load(path)
  RATES.save(path)
  assert Hardware.load(path) == RATES
  for change, said in (
    ({"memory_bytes_per_sec": 0}, "rates must be positive"),
    ({"matmul_flops": {"bfloat16": -1}}, "rates must be positive"),
    ({"matmul_flops": None}, "NoneType"),
    ({"collectives": {"all_gather": [[2, 1], [1, 1]]}}, "sizes rising"),
    ({"collectives": {"all_gather": [1, 2]}}, "lists of"),
    ({"collectives": {"gossip": [[1, 1]]}}, "collectives known"),
  ):
    path.write_text(json.dumps(dataclasses.asdict(RATES) | change))
    with pytest.raises(ValueError, match=f"holds no measured hardware: .*{said}"):
      Hardware.load(path)
  path.write_text("{")
  with pytest.raises(ValueError, match="holds no measured hardware"):
    Hardware.load(path)


def config(settings=(), remat="none", accum=1, **mesh):
  sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
  step = {"step.remat": remat, "step.accum_steps": accum}
  return tiny_config({"model.vocab_size": 384, **dict(settings), **step, **sizes})


@functools.cache
def abstract(cfg):
  """The mesh of four devices and the state on it."""
  mesh = abstract_mesh(cfg, 4)
  with on_mesh(cfg, mesh):
    return mesh, abstract_state(cfg)


def seconds(hardware=RATES, **changes):
  """Seconds of a step, without the memory that `describe` looks at too."""
  cfg = config(**changes)
  mesh, state = abstract(cfg)
  with on_mesh(cfg, mesh):
    counts = count(cfg, state.model, cfg.data.seq_len)
    return step_seconds(cfg, state.model, device_bytes(state), counts, hardware)


def parts(**changes):
  return seconds(**changes)["parts"]


def test_times_follow_the_rates():
  usual = seconds(fsdp=4)
  assert 0 < usual["least"] < usual["likely"] == usual["most"]
  copied = seconds(fsdp=4, copy_engines=True)
  assert copied["parts"] == usual["parts"] and usual["least"] < copied["likely"] < usual["likely"]
  of_links = {"weights gathered", "gradients scattered", "gradients summed", "rows looked up"}
  slower_links = {n: [[size, 10 * s] for size, s in p] for n, p in RATES.collectives.items()}
  half = {dtype: rate / 2 for dtype, rate in RATES.matmul_flops.items()}
  for change, factor, names in (
    ({"matmul_flops": half}, 2, {"matmuls", "attention"}),
    ({"memory_bytes_per_sec": 1e9}, 10, {"elementwise", "update"}),
    ({"collectives": slower_links}, 10, of_links),
  ):
    found = seconds(dataclasses.replace(RATES, **change), fsdp=4)
    for name, value in usual["parts"].items():
      assert found["parts"][name] == pytest.approx(value * (factor if name in names else 1)), name
    assert all(usual["parts"][name] > 0 for name in names)
    assert found["most"] > usual["most"] and found["likely"] > usual["likely"]


def test_what_travels_depends_on_the_mesh():
  """Each axis has the messages that it needs, and no others."""
  always = {"gradients summed"}
  of_weights = {"weights gathered", "gradients scattered", "rows looked up"}
  for changes, expected in (
    ({"data": 4}, always),
    ({"fsdp": 4}, always | of_weights),
    ({"fsdp": 4, "zero": 1}, always | {"new weights gathered"}),
    ({"data": 2, "fsdp": 2, "compress_gradients": "fp8"},
     always | of_weights | {"gradients compressed"}),
    ({"tensor": 2}, always | {"activations summed"}),
    ({"settings": tuple(EXPERTS.items()), "expert": 2},
     always | of_weights | {"tokens exchanged"}),
    ({"context": 2, "data": 2}, always | of_weights | {"heads swapped"}),
    ({"stage": 2, "data": 2, "accum": 4}, always | {"handed on"}),
  ):  # fmt: skip
    found = parts(**changes)
    computed = {"matmuls", "attention", "elementwise", "recomputed", "moved by a stage", "update"}
    assert {name for name in found.keys() - computed if found[name]} == expected, changes


def test_bytes_on_the_links():
  """Two counts by hand."""
  # Tensor: a device has 4 rows of 16 tokens of 32 numbers; four sums a layer, one at the head.
  size = 4 * 16 * 32 * 4
  one = RATES.seconds("all_reduce", size, 2)
  assert parts(tensor=2)["activations summed"] == pytest.approx((2 * 4 + 1) * one)
  again = parts(remat="full", tensor=2)["activations summed"]
  assert again == pytest.approx((2 * 5 + 1) * one)


def test_bytes_of_tokens_on_their_way_to_experts():
  """One layer has them; a device has 2 rows of 16 tokens of 32 numbers, and each two choices."""
  exchanged = lambda remat="none", **how: parts(
    settings=tuple({**EXPERTS, **{f"moe.{name}": value for name, value in how.items()}}.items()),
    remat=remat,
    expert=2,
  )["tokens exchanged"]
  memory, own = RATES.memory_bytes_per_sec, 2 * 16 * 32 * 4
  gathered = 2 * own  # by both devices, whatever the number of choices
  there, back = (RATES.seconds(c, gathered, 2) for c in ("all_gather", "reduce_scatter"))
  all_kept = 2 * there + 2 * back + GATHERED_PASSES * gathered / memory
  assert exchanged() == exchanged(top_k=1) == pytest.approx(all_kept)
  assert exchanged("names") == exchanged("full") == pytest.approx(all_kept + there)
  placed = 1.25 * 2 * own
  one_way = RATES.seconds("all_to_all", placed, 2)
  in_blocks = {"dispatch": "capacity", "capacity_factor": 1.25}
  all_kept = 4 * one_way + PLACED_PASSES * placed / memory
  assert exchanged(**in_blocks) == pytest.approx(all_kept)
  assert exchanged("names", **in_blocks) == pytest.approx(all_kept + 2 * one_way)


def test_stages_of_zero_differ_in_what_they_gather_and_scatter():
  third, second, first = (parts(fsdp=4, zero=zero, accum=2) for zero in (3, 2, 1))
  assert third["new weights gathered"] == 0 == first["weights gathered"]
  assert first["new weights gathered"] == second["new weights gathered"] > 0
  assert second["gradients scattered"] > third["gradients scattered"] > 0
  assert third["rows looked up"] > 0 == second["rows looked up"] == first["rows looked up"]
  assert first["gradients scattered"] == 0
  assert first["gradients summed"] > second["gradients summed"]
  assert first["update"] > third["update"]


def test_what_remat_computes_again():
  again = {r: parts(remat=r, data=4)["recomputed"] for r in ("names", "qkv", "attention", "full")}
  assert again["full"] > again["attention"] > again["qkv"] > again["names"] == 0
  swaps = {r: parts(remat=r, context=2, data=2)["heads swapped"] for r in again}
  assert swaps["qkv"] == swaps["names"] < swaps["attention"]
  once, twice = seconds(data=4), seconds(data=4, remat="full")
  assert twice["most"] == pytest.approx(once["most"] + twice["parts"]["recomputed"])


def test_a_pipeline_idles_and_computes_again():
  one, found = parts(data=4), parts(stage=2, data=2, accum=4)
  # Five ticks for four micro-batches.
  assert found["attention"] == pytest.approx(one["attention"] * 5 / 4)
  assert one["matmuls"] < found["matmuls"] < 5 / 4 * one["matmuls"]  # the head has no bubble
  assert found["recomputed"] > 0
  deep = {"settings": (("model.num_layers", 4),), "stage": 2, "data": 2, "accum": 4}
  of_one, of_two = parts(**deep), parts(stage_rounds=2, **deep)
  assert of_two["attention"] == pytest.approx(of_one["attention"] * 4.5 / 5)
  assert of_two["handed on"] > of_one["handed on"]


def test_compressed_gradients_have_a_rest_on_each_device():
  mesh = {"data": 2, "fsdp": 2, "accum": 2}
  rest = {}
  for sent in ("none", "fp8"):
    cfg = config(compress_gradients=sent, **mesh)
    on, state = abstract(cfg)
    with on_mesh(cfg, on):
      rest[sent] = state_memory(cfg, state)["unsent gradients"]
  matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 2 * 384 * 32
  assert rest == {"none": 0, "fp8": 4 * matrices // 2}
  whole, sent = (parts(**mesh), parts(compress_gradients="fp8", **mesh))
  assert sent["gradients summed"] < whole["gradients summed"]


@pytest.mark.thorough
def test_plans_are_near_what_was_measured():
  """By typical rates, of steps on one to four H100s and H200s."""
  gaps = {step: planned_times.planned(step) / step.ms - 1 for step in planned_times.STEPS}
  assert not {f"{s.devices} {s.gpu}: {s.name}": gap for s, gap in gaps.items() if abs(gap) > 0.12}


def test_plans_prefer_what_was_faster():
  """Copies, rounds of stages where layers are unrolled, and what a stage need not compute again."""
  lab = planned_times
  of = {(s.gpu, s.settings.rpartition(" ")[0]): s for s in lab.STEPS if s.devices == 2}
  for gpu, model, *in_order in (
    ("H100", lab.TWENTY, lab.COPIED, lab.KEPT),
    ("H100", lab.SIXTEEN, lab.COPIED, lab.KEPT, lab.FSDP),
    ("H200", lab.SHORT, f"{lab.ROUNDS} {lab.NAMES}", lab.ROUNDS, lab.STAGE),
    ("H100", lab.SHORT, *(f"{mesh} {lab.LOOP}" for mesh in (lab.STAGE, lab.ROUNDS))),
  ):
    steps = [of[gpu, f"{model} {mesh}"] for mesh in in_order]
    assert sorted(steps, key=lambda step: step.ms) == steps
    assert sorted(steps, key=lab.planned) == steps


def test_what_was_not_measured_is_said():
  alone = dataclasses.replace(RATES, devices=1, collectives={})
  text = "\n".join(render_seconds(seconds(alone, fsdp=4), 1))
  assert "weights gathered            not measured" in text
  with pytest.raises(ValueError, match="matmuls were measured in float16 only"):
    seconds(dataclasses.replace(RATES, matmul_flops={"float16": 1e12}), fsdp=4)


def test_measured_here():
  """On the devices of the tests; small, as only the form matters."""
  found = measure.measure(measure.Work(64, 2**16, (2**14, 2**16)))
  assert found.devices == 8 and set(found.collectives) == set(COLLECTIVES)
  assert all([size for size, _ in p] == [2**14, 2**16] for p in found.collectives.values())
  assert all(seconds > 0 for p in found.collectives.values() for _, seconds in p)
  assert len(measure.rows(found)) == 2 + len(COLLECTIVES)
