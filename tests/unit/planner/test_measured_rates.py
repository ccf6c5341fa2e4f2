"""Measured rates: their file, how they are used, and a plan that depends on them."""

import dataclasses
import json

import pytest
from helpers import tiny_config

from ats_jax.cluster.preflight import measure
from ats_jax.planner import seconds
from ats_jax.planner.describe import describe, render_plan
from ats_jax.planner.hardware import COLLECTIVES, Hardware, typical
from ats_jax.sharding.compressed import sent_bytes

KIB = 2**10
RATES = Hardware(
  "test device",
  4,
  {"bfloat16": 1e12, "float32": 1e11},
  1e10,
  {name: [[1 * KIB, 0.001], [4 * KIB, 0.002]] for name in COLLECTIVES},
)

ATTENTION = 6 * 2 * 4 * (8 + 8) * 16 / 2  # FLOPs of a token of the tiny model
LOGITS = seconds.BYTES_PER_LOGIT * 384 * 8 * 16 / 4 / 1e10  # seconds on each of four devices


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


def test_the_file(tmp_path):
  path = tmp_path / "folder" / "hardware.json"
  RATES.save(path)
  assert Hardware.load(path) == RATES


def test_the_text_says_whether_rates_were_measured():
  times = {"parts": {}, "least": 1.0, "likely": 1.0, "most": 1.0, "device_kind": "a GPU"}
  first_line = lambda devices: seconds.render_seconds(times | {"measured_devices": devices}, 1)[0]
  assert first_line(4) == "a step, from rates measured on 4 x a GPU"
  assert first_line(0) == "a step, from typical rates of a GPU"
  assert typical("H100").is_typical and not RATES.is_typical


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"memory_bytes_per_sec": 0}, "rates must be positive"),
    ({"matmul_flops": {"bfloat16": -1}}, "rates must be positive"),
    ({"matmul_flops": None}, "NoneType"),
    ({"collectives": {"all_gather": [[2, 1], [1, 1]]}}, "sizes rising"),
    ({"collectives": {"all_gather": [1, 2]}}, "lists of"),
    ({"collectives": {"gossip": [[1, 1]]}}, "collectives known"),
  ],
)
def test_another_file(change, said, tmp_path):
  path = tmp_path / "hardware.json"
  path.write_text(json.dumps(dataclasses.asdict(RATES) | change))
  with pytest.raises(ValueError, match=f"holds no measured hardware: .*{said}"):
    Hardware.load(path)


def test_no_file_and_one_that_is_no_json(tmp_path):
  with pytest.raises(ValueError, match=r"there is no .*check_env --measure"):
    Hardware.load(tmp_path / "hardware.json")
  (tmp_path / "hardware.json").write_text("{")
  with pytest.raises(ValueError, match="holds no measured hardware"):
    Hardware.load(tmp_path / "hardware.json")


def plan(hardware=RATES, settings=(), remat="none", accum=1, **mesh):
  sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
  step = {"step.remat": remat, "step.accum_steps": accum}
  cfg = tiny_config({"model.vocab_size": 384, **dict(settings), **step, **sizes})
  return describe(cfg, 4, hardware)


def test_the_plan_uses_them():
  found = plan(fsdp=4)
  parts = found["step_seconds"]["parts"]
  tokens = found["run"]["rows_per_step"] * found["run"]["seq_len"]
  dtype = found["run"]["compute_dtype"]
  flops = found["flops_per_token"]["training"] * tokens / 4
  rate = seconds.MATMUL_EFFICIENCY * RATES.matmul_flops[dtype]
  shortest = seconds.MIN_LENGTH
  falls = seconds.ATTENTION_HALF_LENGTH / shortest + shortest / seconds.ATTENTION_FALL_LENGTH
  of_attention = seconds.MAX_ATTENTION_SHARE * seconds.NARROW_HEAD_SHARE / (1 + falls)
  assert parts["matmuls"] + parts["attention"] * of_attention == pytest.approx(flops / rate)
  assert parts["attention"] == pytest.approx(ATTENTION * tokens / 4 / (rate * of_attention))
  half = dataclasses.replace(RATES, matmul_flops={d: f / 2 for d, f in RATES.matmul_flops.items()})
  assert plan(half, fsdp=4)["step_seconds"]["parts"]["matmuls"] == 2 * parts["matmuls"]
  slow = {n: [[size, 10 * s] for size, s in p] for n, p in RATES.collectives.items()}
  slower = plan(dataclasses.replace(RATES, collectives=slow), fsdp=4)["step_seconds"]
  for name in ("weights gathered", "gradients scattered", "gradients summed"):
    assert parts[name] > 0 and slower["parts"][name] == pytest.approx(10 * parts[name])
  assert slower["most"] > found["step_seconds"]["most"] > found["step_seconds"]["least"]


def test_what_travels_depends_on_the_mesh():
  whole, split = plan(data=4)["step_seconds"], plan(fsdp=4)["step_seconds"]
  assert whole["parts"]["weights gathered"] == whole["parts"]["gradients scattered"] == 0
  assert whole["parts"]["gradients summed"] > split["parts"]["gradients summed"]
  assert whole["parts"]["update"] > 2 * split["parts"]["update"]


def test_what_tokens_cost_on_the_links():
  whole, split = plan(data=4)["step_seconds"], plan(tensor=2)["step_seconds"]["parts"]
  assert whole["parts"]["activations summed"] == whole["parts"]["tokens exchanged"] == 0
  # A device has 4 rows of 16 tokens of 32 numbers; four sums a layer, one at the head.
  size = 4 * 16 * 32 * 4
  one = RATES.seconds("all_reduce", size, 2)
  assert split["activations summed"] == pytest.approx((2 * 4 + 1) * one)
  again = plan(remat="full", tensor=2)["step_seconds"]["parts"]
  assert again["activations summed"] == pytest.approx((2 * 5 + 1) * one)
  cut = plan(tensor=2, shard_residuals=True)["step_seconds"]["parts"]
  to, of = (RATES.seconds(kind, size, 2) for kind in ("all_gather", "reduce_scatter"))
  assert cut["activations summed"] == pytest.approx(2 * (6 * to + 4 * of) + to + of)
  # Gradients of norms are summed over `tensor` too.
  assert cut["gradients summed"] > split["gradients summed"]
  experts = {"moe.num_experts": 4, "moe.top_k": 2, "moe.d_ff": 32, "moe.every": 2}
  sent = plan(settings=experts, expert=2)["step_seconds"]["parts"]["tokens exchanged"]
  # One layer has experts; two of a token's choices may go to each of two devices.
  size = 2 * 2 * 2 * 16 * 32 * 4
  assert sent == pytest.approx(4 * RATES.seconds("all_to_all", size, 2))


def test_what_tokens_cost_between_hosts_and_within():
  experts = {"moe.num_experts": 8, "moe.top_k": 3, "moe.d_ff": 32, "moe.every": 2}
  hosts = {"moe.exchange": "hierarchical", "moe.exchange.hosts": 2, "moe.exchange.factor": 1.0}
  limit = {"moe.num_groups": 2, "moe.top_groups": 1}
  sent = lambda **s: plan(settings=experts | hosts | s, expert=4)["step_seconds"]["parts"]
  # A device has 2 rows of 16 tokens of 32 numbers. All may go to both hosts, or half to each.
  for settings, tokens in (({}, 2 * 16), (limit, 16)):
    size = 2 * tokens * 32 * 4
    between = RATES.seconds("all_to_all", size, 2)
    to, of = (RATES.seconds(kind, 2 * size, 2) for kind in ("all_gather", "reduce_scatter"))
    found = sent(**settings)["tokens exchanged"]
    assert found == pytest.approx(4 * between + 2 * (to + of))


def test_what_rows_cut_over_devices_cost_on_the_links():
  found = plan(context=2, data=2)["step_seconds"]
  # A device has 4 rows of 8 tokens. Queries and outputs have 4 heads of 8 numbers; keys and values
  # have 2. Each is swapped in both passes of two layers.
  swap = lambda heads: RATES.seconds("all_to_all", 4 * 8 * heads * 8 * 4, 2)
  assert found["parts"]["heads swapped"] == pytest.approx(2 * 2 * 2 * (swap(4) + swap(2)))
  again = plan(remat="names", context=2, data=2)["step_seconds"]["parts"]
  assert again["heads swapped"] == pytest.approx(2 * (2 * 2 * (swap(4) + swap(2)) + swap(4)))
  again = plan(remat="attention", context=2, data=2)["step_seconds"]["parts"]
  assert again["heads swapped"] == pytest.approx(2 * 3 * 2 * (swap(4) + swap(2)))
  # Each of the two key/value heads goes to two devices.
  copied = plan(context=4, data=1)["step_seconds"]["parts"]["heads swapped"]
  size = 8 * 4 * 4 * 8 * 4
  assert copied == pytest.approx(2 * 2 * 4 * RATES.seconds("all_to_all", size, 4))
  # Weights are gathered and gradients scattered as with fsdp.
  for name in ("weights gathered", "gradients scattered", "gradients summed"):
    of_fsdp = plan(fsdp=2, data=2)["step_seconds"]["parts"][name]
    assert found["parts"][name] == pytest.approx(of_fsdp) and of_fsdp > 0
  assert plan(data=4)["step_seconds"]["parts"]["heads swapped"] == 0


def test_what_remat_computes_again():
  parts = lambda remat, **mesh: plan(remat=remat, **(mesh or {"data": 4}))["step_seconds"]["parts"]
  again = {remat: parts(remat)["recomputed"] for remat in ("names", "qkv", "attention", "full")}
  assert again["full"] > again["attention"] > again["qkv"] > again["names"] == 0
  mlp, attention = 3 * 32 * 64, 32 * (4 + 2 + 2 + 4) * 8
  assert again["qkv"] == pytest.approx(again["attention"] * mlp / (mlp + attention))
  of_swaps = lambda remat: parts(remat, context=2, data=2)["heads swapped"]
  assert of_swaps("qkv") == of_swaps("names") < of_swaps("attention")
  # A layer with its residuals cut gathers six times; of the MLP's two sub-layers one once more.
  cut = {"tensor": 2, "data": 2, "shard_residuals": True}
  of_sums = lambda remat: parts(remat, **cut)["activations summed"]
  gather = RATES.seconds("all_gather", 4 * 16 * 32 * 4, 2)
  assert of_sums("qkv") == pytest.approx(of_sums("none") + 2 * gather)


def test_what_a_ring_costs_on_the_links():
  parts = lambda remat: plan(remat=remat, context=4, context_ring=True)["step_seconds"]["parts"]
  # A device has 8 rows of 4 tokens of 4 heads of 8 numbers, and of 2 of keys and of values.
  sent = lambda heads: RATES.seconds("all_gather", 2 * 8 * 4 * heads * 8 * 4, 2)
  moved, round_it, gradients = sent(4 + 2 + 2 + 4), sent(3 * 4), sent(3 * 4 + 4 * 4)
  found = {remat: parts(remat) for remat in ("none", "names", "full", "attention")}
  none, names, full, attention = (found[remat]["sent round a ring"] for remat in found)
  assert none == pytest.approx(2 * (2 * moved + round_it + gradients))
  assert names == pytest.approx(none + 2 * moved)
  assert full == pytest.approx(names + 2 * round_it)
  assert attention == pytest.approx(names)  # what a ring gives is kept
  assert found["none"]["heads swapped"] == 0


def test_a_pipeline():
  one, found = plan(data=4)["step_seconds"]["parts"], plan(stage=2, data=2, accum=4)["step_seconds"]
  parts, ticks = found["parts"], 5
  # A device has a micro-batch of one row. It hands it on, and its gradient back.
  stream = 16 * 32 * 4
  handed = 2 * ticks * RATES.seconds("all_gather", 2 * stream, 2)
  ends = [RATES.seconds(name, 4 * stream, 2) for name in ("all_gather", "reduce_scatter")]
  ends += [2 * RATES.seconds("all_to_all", 4 * stream, 2)]
  assert parts["handed on"] == pytest.approx(handed + sum(ends))
  assert one["handed on"] == 0
  rate = seconds.MATMUL_EFFICIENCY * RATES.matmul_flops["float32"]
  head = 6 * 384 * 32 * 8 * 16 / 4 / rate  # has no bubble
  in_layers = (one["matmuls"] - head) * ticks / 4
  assert parts["matmuls"] == pytest.approx(in_layers + head)
  assert parts["attention"] == pytest.approx(one["attention"] * ticks / 4)
  passes = (one["elementwise"] - LOGITS) * ticks / 4
  assert parts["elementwise"] == pytest.approx(passes + LOGITS)
  assert parts["recomputed"] == pytest.approx((in_layers + parts["attention"] + passes) / 3)
  twice = plan(stage=2, data=2, accum=4, remat="full")["step_seconds"]["parts"]
  assert twice["recomputed"] == pytest.approx(2 * parts["recomputed"])
  # Each stage sums the gradients of its layers over data in each tick; embedding, head and the
  # last norm are summed over all devices, once.
  layer = 32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 64 + 2 * 32
  of_layers = ticks * RATES.seconds("all_reduce", 4 * layer, 2)
  of_ends = RATES.seconds("all_reduce", 4 * (2 * 384 * 32 + 32), 4)
  assert parts["gradients summed"] == pytest.approx(of_layers + of_ends)
  # Of layers that exchange tokens, the forward pass is made once more.
  cut = plan(stage=2, context=2, accum=4)["step_seconds"]["parts"]["heads swapped"]
  swap = lambda heads: RATES.seconds("all_to_all", 2 * 8 * heads * 8 * 4, 2)
  assert cut == pytest.approx(3 * ticks * 2 * (swap(4) + swap(2)))


def test_a_pipeline_of_several_rounds():
  deep, sizes = {"model.num_layers": 4}, {"stage": 2, "data": 2, "accum": 4}
  of = lambda rounds, kept="full": plan(
    settings=deep | {"step.remat_stages": kept}, stage_rounds=rounds, **sizes
  )["step_seconds"]["parts"]
  one, two, kept = of(1), of(2), of(1, "dots")
  # Nine ticks of half as many layers, where there were five.
  assert two["attention"] == pytest.approx(one["attention"] * 4.5 / 5)
  assert two["recomputed"] == pytest.approx(one["recomputed"] * 4.5 / 5)
  more = 2 * 4 * RATES.seconds("all_gather", 2 * 16 * 32 * 4, 2)
  assert two["handed on"] - one["handed on"] == pytest.approx(more)
  assert one["recomputed"] > 0 and kept["recomputed"] == 0


def test_what_is_computed_twice():
  once, twice = plan(data=4)["step_seconds"], plan(remat="full", data=4)["step_seconds"]
  head = 6 * 384 * 32
  assert once["parts"]["recomputed"] == 0
  rate = seconds.MATMUL_EFFICIENCY * RATES.matmul_flops["float32"]
  layers = once["parts"]["matmuls"] - head * 8 * 16 / 4 / rate
  forward = layers + once["parts"]["attention"] + once["parts"]["elementwise"] - LOGITS
  assert twice["parts"]["recomputed"] == pytest.approx(forward / 3)
  assert twice["most"] == pytest.approx(once["most"] + twice["parts"]["recomputed"])


def test_elementwise_ops_take_the_time_of_the_memory_that_they_go_through():
  one = plan(data=4)["step_seconds"]["parts"]["elementwise"] - LOGITS
  numbers = 2 * (seconds.STREAM_PASSES * 32 + seconds.FF_PASSES * 64)  # of a token
  assert one == pytest.approx(4 * numbers * 8 * 16 / 4 / 1e10)
  experts = {"moe.num_experts": 4, "moe.top_k": 2, "moe.d_ff": 32, "moe.num_shared": 1}
  sparse = plan(settings=experts, data=4)["step_seconds"]["parts"]["elementwise"] - LOGITS
  more = 2 * (seconds.FF_PASSES * (3 * 32 - 64) + seconds.CHOICE_PASSES * 2 * 32)
  assert sparse - one == pytest.approx(4 * more * 8 * 16 / 4 / 1e10)
  # `tensor` cuts widths, and the stream where positions are cut between sub-layers too.
  parts = lambda cut: plan(tensor=2, data=2, shard_residuals=cut)["step_seconds"]["parts"]
  stream = 2 * seconds.STREAM_PASSES * 32 * 8 * 16 / 2
  less = parts(False)["elementwise"] - parts(True)["elementwise"]
  assert less == pytest.approx(4 * stream / 2 / 1e10)


def test_stages_of_zero_differ_in_what_they_gather_and_scatter():
  third, second, first = (
    plan(fsdp=4, zero=zero, accum=2)["step_seconds"]["parts"] for zero in (3, 2, 1)
  )
  assert third["new weights gathered"] == 0 == first["weights gathered"]
  assert first["new weights gathered"] == second["new weights gathered"] > 0
  # Of the table parts of rows are swapped where it is cut, and in the compute dtype.
  assert second["gradients scattered"] > third["gradients scattered"] > 0
  assert third["rows looked up"] > 0 == second["rows looked up"] == first["rows looked up"]
  assert first["gradients scattered"] == 0
  assert first["gradients summed"] > second["gradients summed"]
  assert first["update"] > third["update"]


def test_what_was_not_measured_is_said():
  alone = dataclasses.replace(RATES, devices=1, collectives={})
  text = render_plan(plan(alone, fsdp=4))
  assert "weights gathered            not measured" in text
  with pytest.raises(ValueError, match="matmuls were measured in float16 only"):
    plan(dataclasses.replace(RATES, matmul_flops={"float16": 1e12}), fsdp=4)
  assert "a step, from rates" not in render_plan(plan(None, fsdp=4))


def test_measured_here():
  """On the devices of the tests; small, as only the form matters."""
  found = measure.measure(measure.Work(64, 2**16, (2**14, 2**16)))
  assert found.devices == 8 and set(found.collectives) == set(COLLECTIVES)
  assert all([size for size, _ in p] == [2**14, 2**16] for p in found.collectives.values())
  assert all(seconds > 0 for p in found.collectives.values() for _, seconds in p)
  assert len(measure.rows(found)) == 2 + len(COLLECTIVES)


def test_what_compressed_gradients_cost():
  mesh = {"data": 2, "fsdp": 2, "accum": 2}
  whole, sent = plan(**mesh), plan(compress_gradients="fp8", **mesh)
  matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 2 * 384 * 32
  assert whole["device_bytes_exact"]["unsent gradients"] == 0
  assert sent["device_bytes_exact"]["unsent gradients"] == 4 * matrices // 2
  more = (sum(p["device_bytes_exact"].values()) for p in (sent, whole))
  assert next(more) - next(more) == 4 * matrices // 2
  whole, sent = (p["step_seconds"]["parts"] for p in (whole, sent))
  assert whole["gradients compressed"] == 0
  # Once an update, there and back; beyond what was measured the bandwidth of the largest holds.
  size = sent_bytes(matrices // 2)
  both = sum(RATES.seconds(kind, size, 2) or 0 for kind in ("all_to_all", "all_gather"))
  assert sent["gradients compressed"] == pytest.approx(both)
  assert sent["gradients summed"] < whole["gradients summed"]
