"""Planned bytes against arrays that exist, and estimates against what is known of them."""

import dataclasses
import functools
import math

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, tiny_config

from ats_jax.config.schema.setting import Table
from ats_jax.planner.abstract import abstract_mesh, abstract_state, batch_on_mesh, device_bytes
from ats_jax.planner.describe import describe, planned_bytes, render_plan
from ats_jax.planner.memory import activations, kv_cache_bytes, peak, state_memory
from ats_jax.sharding.apply import num_shards
from ats_jax.sharding.mesh import on_mesh
from ats_jax.step.core import sums_and_grads
from ats_jax.step.objective import Pretraining, batch_totals
from ats_jax.step.program import make_program, predicted_bytes

SPARSE = {
  "moe.num_experts": 4,
  "moe.num_shared": 1,
  "mod.routing": "learned",
  "mod.decision": "predictor",
  "precision.param_dtype": "bfloat16",
  "optimizer.mu_dtype": "bfloat16",
  "optimizer.ema_decay": 0.9,
}
MESH = {"mesh.data": 1, "mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2}


def on_first_device(tree):
  shards = [s.data for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device.id == 0]
  return sum(math.prod(s.shape) * s.dtype.itemsize for s in shards)


def planned(cfg, devices=0):
  """The abstract state, and a context in which to use it."""
  mesh = abstract_mesh(cfg, devices)
  with on_mesh(cfg, mesh):
    return abstract_state(cfg), on_mesh(cfg, mesh)


@pytest.mark.thorough
def test_state_is_what_eight_devices_hold():
  cfg = tiny_config(SPARSE | MESH | {"model.num_layers": 1, "mod.every": 1})
  abstract, context = planned(cfg)
  with context:
    parts = state_memory(cfg, abstract)
  with jax.set_mesh(make_test_mesh(1, 2, 2, 2)):
    plan = make_program(cfg)
    state = plan.init()
    rules = plan.training_rules(1)
    grads = jax.eval_shape(
      lambda s, b: sums_and_grads(
        Pretraining(cfg), s.model, b, batch_totals(b, rules), s.key, rules
      )[2],
      state,
      batch_on_mesh(1, 8, 16),
    )
  assert parts["weights"] == on_first_device(state.model)
  assert parts["ema"] == on_first_device(state.ema) > parts["weights"]
  assert parts["gradients"] == device_bytes(grads)
  moments = state.opt_state[1]
  assert (parts["mu"], parts["nu"]) == (on_first_device(moments.mu), on_first_device(moments.nu))
  in_state = sum(parts.values()) - parts["gradients"]
  key = jax.random.key_data(state.key)
  assert in_state == on_first_device(dataclasses.replace(state, key=key))
  assert parts["gradient sums"] == 0


def test_sums_of_accumulated_gradients_are_float32():
  cfg = tiny_config(SPARSE | {"step.accum_steps": 2})
  state, context = planned(cfg)
  with context:
    assert state_memory(cfg, state)["gradient sums"] == state_memory(cfg, state)["nu"]


def test_a_mesh_of_4096_devices():
  sizes = {"mesh.data": 4, "mesh.fsdp": 64, "mesh.expert": 4, "mesh.tensor": 4}
  dims = {"model.d_model": 1024, "model.d_ff": 512, "model.vocab_size": 1024, "moe.num_experts": 8}
  batch = {"data.batch_size": 1024, "model.num_kv_heads": 4}
  cfg = tiny_config(sizes | dims | batch)
  state, _ = planned(cfg, 4096)
  layer = state.model.segments[0].layers[0]
  # Two layers of eight experts, and so on, in float32.
  assert device_bytes(layer.mlp.gate) == 4 * 2 * 8 * 1024 * 512 / (4 * 64 * 4)
  assert device_bytes(layer.attn.q) == 4 * 2 * 1024 * 1024 / (64 * 4 * 4)
  assert device_bytes(layer.attn_norm) == 4 * 2 * 1024
  assert device_bytes(state.model.embed) == 4 * 1024 * 1024 / (64 * 4 * 4)


def test_a_mesh_that_does_not_fit():
  for changes, message in (
    ({"mesh.fsdp": 4}, r"mesh.fsdp=4 x mesh.expert=1 x .* = 4 does not divide the 6 devices"),
    ({"mesh.data": 2}, r"mesh 1x2x1x1x1x1 .* needs 2 devices, there are 6"),
    ({"data.batch_size": 8}, r"data.batch_size=8 / step.accum_steps=1 = 8 rows .* 6 shards"),
  ):
    with pytest.raises(ValueError, match=message):
      abstract_mesh(tiny_config({"data.batch_size": 24} | changes), 6)


@functools.cache
def kept(**changes):
  """Estimated bytes of the activations of a tiny model, by default of 8 rows of 16 tokens."""
  cfg = tiny_config({name.replace("__", "."): value for name, value in changes.items()})
  state, context = planned(cfg)
  with context:
    return activations(cfg, state, cfg.data.batch_size // num_shards("batch"))


def test_full_remat_keeps_the_residual_stream():
  stream = 8 * 16 * 32 * 4
  shallow, deep = kept(step__remat="full"), kept(step__remat="full", model__num_layers=7)
  assert deep - shallow == 5 * stream
  # Besides: inputs and outputs of the last norm and of the loss, the head's gradient.
  assert 2 * stream + 64 * 32 * 4 < shallow < 6 * stream + 2 * 64 * 32 * 4


def test_policies_keep_more_in_their_order():
  by_policy = [kept(step__remat=policy) for policy in ("full", "names", "dots", "none")]
  assert by_policy == sorted(by_policy) and len(set(by_policy)) == 4
  # 'names': queries, keys, values, attention's output, and the two halves of the feed-forward.
  named = 2 * 8 * 16 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8 + 64 + 64) * 4
  assert by_policy[1] - by_policy[0] == named


def test_flash_attention_keeps_nothing_of_seq_by_seq():
  """The estimate grows with the tokens, whatever the length of a row."""
  flash = kept(step__remat="none")
  as_short = kept(step__remat="none", data__seq_len=8, data__batch_size=16)
  assert flash == pytest.approx(as_short, rel=1e-3)
  whole = kept(step__remat="none", ops__kernels=Table(attention="xla"))
  scores = 2 * 8 * 4 * 16 * 16 * 4  # layers x rows x heads x seq x seq, float32
  assert scores <= whole - flash <= 4 * scores


def test_activations_are_cut_along_the_row():
  one, two = kept(step__remat="full"), kept(step__remat="full", mesh__context=2)
  ids = 8 * 16 * 4  # of the segments of whole rows
  assert two == pytest.approx(one / 2, abs=2 * ids)
  sizes = {"mesh.context": 2, "mesh.data": 2, "model.vocab_size": 384}
  cfg = tiny_config(sizes | {"step.loss_chunk_tokens": 4096})
  found = describe(cfg)
  assert "at a time on each: 4 x 8 tokens" in render_plan(found)
  assert found["device_bytes_estimated"]["logits chunk"] == 4 * 8 * 384 * (4 + 4)


def test_activations_are_cut_along_the_batch():
  one = kept(step__remat="full", mesh__data=1)
  four = kept(step__remat="full", mesh__data=2, mesh__fsdp=2)
  head = 64 * 32 * 4  # its gradient is cut along fsdp
  assert four == pytest.approx((one - head) / 4 + head / 2, rel=0.05)


@pytest.mark.thorough
def test_activations_of_experts_grow_with_the_room_and_not_with_the_devices():
  """Of two layers: each further row of room is kept as input, gate, up, product and output."""
  experts = {"moe__num_experts": 8, "moe__top_k": 1, "mesh__expert": 8}
  text = {"data__seq_len": 64, "data__batch_size": 16, "model__d_model": 64}
  at = lambda factor, **more: kept(moe__exchange__factor=factor, **experts, **text, **more)
  rows = 2 * 64  # of a device: rows of text x tokens, one choice each
  a_row = 4 * 5 * 64
  tight, whole = at(1.0), at(8.0)
  more = (at(2.0) - tight) / (2 * rows)
  # Places and tiles take some more.
  assert a_row <= more < 1.3 * a_row
  assert whole - tight > 6.5 * 2 * rows * more  # room for the worst case
  # In two steps, what a host received from both hosts is kept beside the rows of experts.
  two_steps = at(8.0, moe__exchange="hierarchical", moe__exchange__hosts=2) - whole
  assert 4 * 64 * 2 * rows <= two_steps / 2 < 3 * 4 * 64 * 2 * rows


def test_what_a_step_needs_besides():
  changes = {"step.remat": "full", "precision.compute_dtype": "bfloat16", "mesh.fsdp": 2}
  cfg = tiny_config(changes | {"step.scan_unroll": 1})
  state, context = planned(cfg)
  with context:
    parts = peak(cfg, state).parts
  layer = (32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 64 + 2 * 32) * 2
  assert parts["compute weights"] == layer + 2 * 64 * 32  # and the head, in bfloat16
  assert parts["head's gradient"] == 64 * 32 * 4 // 2  # the half that the gradients do not have
  # 48 tokens over two devices; float32 logits and their gradient in bfloat16.
  assert parts["logits chunk"] == 24 * 64 * 6
  assert (
    parts["recomputed block"]
    == kept(step__remat="none", precision__compute_dtype="bfloat16", mesh__fsdp=2) // 2
  )


SMALLEST = {"model.vocab_size": 384}  # that the tokenizer needs


def test_weights_in_the_compute_dtype():
  """Those of an unrolled stack are made once; what is stored like that is not made."""
  layer = (32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 64 + 2 * 32) * 2
  head = 64 * 32 * 2

  def part(**changes):
    narrow = {"precision.compute_dtype": "bfloat16", "step.remat": "dots"}
    cfg = tiny_config(narrow | {name.replace("__", "."): v for name, v in changes.items()})
    state, context = planned(cfg)
    with context:
      return peak(cfg, state, lambda cfg, rows: 10**6).parts["compute weights"]

  assert part(step__scan_unroll=2) == 2 * layer + head
  assert part(step__scan_unroll=1) == layer + head
  bfloat16 = {"step__scan_unroll": 2, "precision__param_dtype": "bfloat16"}
  assert part(**bfloat16) == 2 * (2 * 32 * 2)  # norms
  experts = bfloat16 | {"moe__num_experts": 4}
  copied = part(**experts, ops__kernels={"grouped_matmul": "triton"}) - part(**experts)
  assert copied == 2 * 4 * 3 * 32 * tiny_config({"moe.num_experts": 4}).moe.d_ff * 2


def test_what_codes_and_frozen_matrices_need():
  """Codes are decoded for a matmul in a layer; no gradient of activations waits for the end."""
  usual = {
    "finetune.adapter.name": "lora",
    "finetune.adapter.rank": 2,
    "precision.param_dtype": "bfloat16",
    "precision.compute_dtype": "bfloat16",
    "step.remat": "full",
    "step.scan_unroll": 2,
  }

  def parts(**changes):
    cfg = tiny_config(usual | {name.replace("__", "."): v for name, v in changes.items()})
    state, context = planned(cfg)
    with context:
      return peak(cfg, state, lambda cfg, rows: 10**6)

  in_block = {"step__loss_chunk_tokens": 1}
  plain, codes = parts(**in_block), parts(**in_block, finetune__adapter__base="int8")
  assert plain.moment == codes.moment == "the first layer of the backward pass"
  more = codes.parts["compute weights"] - plain.parts["compute weights"]
  assert more == 2 * 2 * 32 * 64  # gate and up, which read the same
  cfg = tiny_config(usual)
  tokens = cfg.data.batch_size // cfg.step.accum_steps * cfg.data.seq_len
  assert plain.parts["block's gradients"] == tokens * 2 * (32 + 2 * 64)
  big = {"model__vocab_size": 2**20, "finetune__adapter__base": "int8"}
  loss = parts(**big)
  assert loss.moment == "the loss"
  assert loss.parts["compute weights"] == plain.parts["compute weights"]


def test_what_is_largest_depends_on_the_run():
  """Much text in the loss, few rows, or much that the layers keep; a loop has all at once."""
  usual = {"model.vocab_size": 384, "step.remat": "full", "step.scan_unroll": 2}
  for name, changes in {
    "the loss": {"data.batch_size": 64, "step.loss_chunk_tokens": 1024, "model.vocab_size": 4096},
    "the last layer of the backward pass": {"data.batch_size": 2, "step.loss_chunk_tokens": 1},
    "the first layer of the backward pass": {
      "data.batch_size": 64, "mesh.data": 2, "step.loss_chunk_tokens": 1, "step.remat": "dots",
    },
    "all at once": {"step.scan_unroll": 1},
  }.items():  # fmt: skip
    cfg = tiny_config(usual | changes | {"ops.kernels": {"attention": "xla"}})
    state, context = planned(cfg)
    with context:
      assert peak(cfg, state).moment.startswith(name)
  plan = describe(cfg)
  assert planned_bytes(plan) > sum(plan["device_bytes_exact"].values())
  assert f"Largest moment of a step: {name}" in render_plan(plan)


def test_scores_of_some_queries():
  """In a loop the larger of them and the logits counts; unrolled they are of the backward pass."""
  names = {"model.vocab_size": 384, "ops.kernels": {"attention": "chunked"}}

  def estimated(**changes):
    more = {name.replace("__", "."): value for name, value in changes.items()}
    return describe(tiny_config(names | {"step.scan_unroll": 1} | more))["device_bytes_estimated"]

  scores = 8 * 4 * 16 * 16
  found = estimated(step__loss_chunk_tokens=1)
  # Scores, what is exponentiated and its result in float32; weights; what is seen.
  assert found["scores chunk"] == pytest.approx(scores * (3 * 4 + 4 + 1), rel=0.1)
  assert found["logits chunk"] == 0
  found = estimated(step__loss_chunk_tokens=128)
  assert found["scores chunk"] == 0 and found["logits chunk"] == 128 * 384 * 8
  assert (
    estimated(ops__kernels={"attention": "xla"}, step__loss_chunk_tokens=1)["scores chunk"] == 0
  )


# Rows are large enough that what XLA adds for itself matters little.
COMPILED = {
  "orchestrator.mode": "off",
  "model.num_layers": 8,
  "model.d_model": 64,
  "model.num_kv_heads": 4,
  "model.head_dim": 16,
  "model.d_ff": 256,
  "model.vocab_size": 1024,
  "data.batch_size": 16,
  "data.seq_len": 128,
  "ops.kernels": {"attention": "xla"},
  "step.loss_chunk_tokens": 512,
}


CHUNKS = {"ops.kernels": {"attention": "chunked"}, "data.seq_len": 256, "step.remat": "full"}
PIPELINE = {
  "mesh.stage": 2,
  "mesh.stage_rounds": 2,
  "mesh.fsdp": 2,
  "step.accum_steps": 4,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
  "changes", [{}, CHUNKS, PIPELINE], ids=["alone", "chunks of queries", "pipeline"]
)
def test_a_step_needs_what_its_program_does(changes):
  """Within a tenth of XLA's account of the compiled step."""
  cfg = tiny_config(COMPILED | {"step.scan_unroll": 1, "step.remat": "dots"} | changes)
  mesh = make_test_mesh(1, cfg.mesh.fsdp, 1, stage=cfg.mesh.stage)
  with on_mesh(cfg, mesh):
    program = make_program(cfg)
    step = program.compile_train_step(program.init(abstract=True), program.training_rules(1))
  assert planned_bytes(describe(cfg)) == pytest.approx(predicted_bytes(step), rel=0.1)


def test_keys_and_values_are_those_of_the_cache():
  cfg = canonical.config("depths")
  state, context = planned(cfg)
  with context:
    expected = kv_cache_bytes(cfg, state.model)
  rules = canonical.program(cfg).rules(cfg.num_steps)
  with jax.set_mesh(canonical.mesh()):
    cache = canonical.model(cfg).empty_cache(1, 16, rules, jnp.float32)
  real = [layer.kv for segment in cache for layer in segment]
  assert expected == sum(np.asarray(a).nbytes for a in jax.tree.leaves(real))
  layer = 2 * 16 * 2 * 8 * 4  # keys and values, tokens, heads, their size, float32
  assert layer < expected < 2 * layer  # the second has places for less than all tokens
