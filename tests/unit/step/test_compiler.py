"""Options of XLA: parsed, tried, and in force in the compiled step."""

import logging

import pytest
from helpers import tiny_config

from ats_jax.ops.requirements import Device
from ats_jax.step import compiler
from ats_jax.step import program as programs
from ats_jax.step.compiler import compiler_options
from ats_jax.step.program import abstract_batch, make_program


def device_of(kind):
  return Device("gpu" if "NVIDIA" in kind else "cpu", "9.0", kind)


def options(asked, kind="cpu"):
  return compiler_options(tiny_config({"step.compiler_options": asked}), device_of(kind))


def test_values_may_hold_commas():
  asked = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS", "xla_disable_hlo_passes": "fusion"}
  assert options(asked) == asked


@pytest.mark.parametrize("name", ["fast", ""])
def test_what_is_no_option(name):
  with pytest.raises(
    ValueError, match=rf"^step\.compiler_options: {name}=true: .*Change or remove"
  ):
    options({name: "true"})


def test_an_option_of_the_run_that_xla_refuses_is_an_error():
  with pytest.raises(ValueError, match=r"xla_gpu_none=1: .*No such compile option"):
    options({"xla_gpu_none": "1"})
  with pytest.raises(ValueError, match=r"xla_backend_optimization_level=x: .*not a valid"):
    options({"xla_backend_optimization_level": "x"})


def test_a_default_that_xla_refuses_is_left_out_with_a_warning(monkeypatch, caplog):
  table = {"xla_gpu_none": "1", "xla_gpu_enable_dynamic_slice_fusion": "false"}
  monkeypatch.setattr(compiler, "default_options", lambda cfg, device: table)
  with caplog.at_level(logging.WARNING):
    assert options({}, "NVIDIA H200") == {"xla_gpu_enable_dynamic_slice_fusion": False}
  assert "xla_gpu_none=1, a default of NVIDIA H200, is left out" in caplog.text
  asked = options({"xla_gpu_enable_dynamic_slice_fusion": "true"}, "NVIDIA H200")
  assert asked == {"xla_gpu_enable_dynamic_slice_fusion": True}


H200, EXPERTS, LOOP = "NVIDIA H200", {"moe.num_experts": 4}, {"step.scan_unroll": 1}
FP8 = {"precision.fp8": True, "precision.fp8_keep_first": 0, "precision.fp8_keep_last": 0}
UNROLLED = {"model.num_layers": 32, "model.d_model": 4096, "model.num_heads": 32}
MANY = {"moe.num_experts": 64, "moe.top_k": 4}
KEPT = {"mesh.fsdp": 2, "mesh.keep_gathered": True}
COPIES = {"mesh.fsdp": 2, "mesh.copy_engines": True}
FUSION, TRITON = "xla_gpu_enable_dynamic_slice_fusion", "xla_gpu_enable_triton_gemm"
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
PERMUTE = "xla_gpu_collective_permute_mode"


@pytest.mark.parametrize(
  ("option", "kind", "settings", "wanted"),
  [
    # Experts in a loop run once on Hopper.
    (FUSION, H200, EXPERTS | LOOP, "false"),
    (FUSION, H200, EXPERTS | {"step.scan_unroll": 2}, None),  # both layers: no loop
    (FUSION, H200, LOOP, None),
    (FUSION, "NVIDIA A100", EXPERTS | LOOP, None),
    # Eight bits leave matrix products to the library.
    (TRITON, H200, FP8, "false"),
    (TRITON, "NVIDIA L4", FP8, "false"),
    (TRITON, "cpu", FP8, None),
    # Triton is not timed where it wins nothing.
    (TRITON, H200, {}, None),
    (TRITON, H200, UNROLLED, "false"),
    (TRITON, H200, UNROLLED | {"model.d_model": 2048}, None),
    (TRITON, H200, UNROLLED | LOOP, None),
    (TRITON, H200, UNROLLED | {"model.num_layers": 33}, None),  # a loop
    (TRITON, H200, UNROLLED | {"moe.num_experts": 8}, None),
    (TRITON, H200, MANY, "false"),
    (TRITON, H200, MANY | {"moe.num_experts": 63}, None),
    (TRITON, "cpu", UNROLLED | MANY, None),
    # Several collectives at once where gathered weights are kept.
    (OVERLAP, H200, KEPT, "4"),
    (OVERLAP, H200, KEPT | {"mesh.keep_gathered": False}, None),
    (OVERLAP, "cpu", KEPT, None),
    # Permutations are copies where a run asks for it.
    (PERMUTE, H200, COPIES, "COLLECTIVES_PEER_MEMORY"),
    (PERMUTE, H200, COPIES | {"mesh.copy_engines": False}, None),
    (PERMUTE, "cpu", COPIES, None),
  ],
)
def test_defaults_of_a_device_and_a_config(option, kind, settings, wanted):
  cfg, device = tiny_config(settings), device_of(kind)
  found = compiler.default_options(cfg, device)
  assert found.get(option) == wanted
  of_evaluation = compiler.evaluation_options(found | {"xla_gpu_other": "true"})
  assert "xla_gpu_other" not in of_evaluation
  if option in (TRITON, PERMUTE):
    assert of_evaluation.get(option) == wanted
  if option == TRITON:  # the run's own word goes before
    asked = tiny_config(settings | {"step.compiler_options": {option: "true"}})
    assert compiler_options(asked, device)[option] is True


@pytest.mark.parametrize("unroll", [0, 1])
def test_weights_that_a_loop_gathers_are_not_kept(mesh, unroll):
  cfg = tiny_config({"mesh.fsdp": 2, "mesh.keep_gathered": True, "step.scan_unroll": unroll})
  with pytest.raises(ValueError, match=r"scan_unroll=1 of model.num_layers=2.*scan_unroll=2, or"):
    make_program(cfg)


def test_the_evaluation_gets_its_options(mesh, monkeypatch):
  monkeypatch.setattr(compiler, "NO_TRITON_MATMULS", {"xla_disable_hlo_passes": ""})
  rows = abstract_batch((2, 16), None)

  def kernels(asked):
    program = make_program(tiny_config({"model.num_layers": 1, "step.compiler_options": asked}))
    model = program.init(abstract=True).model
    return (
      program.eval_step.lower(model, rows, program.rules(1)).compile().as_text().count(" fusion(")
    )

  assert kernels({"xla_disable_hlo_passes": "fusion"}) > 1.2 * kernels({})


@pytest.mark.thorough
def test_the_compiled_step_obeys(mesh):
  def kernels(asked):
    program = make_program(tiny_config({"step.compiler_options": asked, "model.num_layers": 1}))
    compiled = program.compile_train_step(program.init(abstract=True), program.training_rules(1))
    return compiled.as_text().count(" fusion(")

  # Without the pass that joins operations, each is a kernel of its own.
  assert kernels({"xla_disable_hlo_passes": "fusion"}) > 1.2 * kernels({})


@pytest.mark.parametrize(
  ("platform", "unroll", "deterministic", "warns"),
  [
    ("gpu", 2, True, True),
    ("gpu", 1, True, False),
    ("gpu", 2, False, False),
    ("cpu", 2, True, False),
  ],
)
def test_what_stops_in_xla_is_warned_of(
  monkeypatch, caplog, mesh, platform, unroll, deterministic, warns
):
  monkeypatch.setattr(programs, "this_device", lambda: Device(platform, "9.0"))
  cfg = tiny_config({"step.scan_unroll": unroll, "precision.deterministic": deterministic})
  with caplog.at_level(logging.WARNING):
    make_program(cfg)
  assert ("use step.scan_unroll=1" in caplog.text) == warns
