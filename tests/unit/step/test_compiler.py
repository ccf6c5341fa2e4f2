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


@pytest.mark.parametrize(
  ("kind", "experts", "unroll", "wanted"),
  [
    ("NVIDIA H200", 4, 1, True),
    ("NVIDIA H200", 4, 2, False),  # both layers: no loop
    ("NVIDIA H200", 0, 1, False),
    ("NVIDIA A100", 4, 1, False),
  ],
)
def test_experts_in_a_loop_run_once_on_hopper(kind, experts, unroll, wanted):
  settings = {"model.num_layers": 2, "moe.num_experts": experts, "step.scan_unroll": unroll}
  found = compiler_options(tiny_config(settings), device_of(kind))
  assert found == ({"xla_gpu_enable_dynamic_slice_fusion": False} if wanted else {})


@pytest.mark.parametrize(
  ("kind", "fp8", "wanted"),
  [
    ("NVIDIA H200", True, True),
    ("NVIDIA L4", True, True),
    ("NVIDIA H200", False, False),
    ("cpu", True, False),
  ],
)
def test_eight_bits_leave_matmuls_to_the_library(kind, fp8, wanted):
  keeps = {"precision.fp8_keep_first": 0, "precision.fp8_keep_last": 0} if fp8 else {}
  found = compiler_options(tiny_config({"precision.fp8": fp8, **keeps}), device_of(kind))
  assert found == ({"xla_gpu_enable_triton_gemm": False} if wanted else {})
  assert compiler.evaluation_options(found | {"xla_gpu_other": True}) == found


UNROLLED = {"model.num_layers": 32, "model.d_model": 4096, "model.num_heads": 32}
MANY = {"moe.num_experts": 64, "moe.top_k": 4}


@pytest.mark.parametrize(
  ("kind", "settings", "wanted"),
  [
    ("NVIDIA H200", UNROLLED, True),
    ("NVIDIA H200", UNROLLED | {"model.d_model": 8192}, True),
    ("NVIDIA H200", UNROLLED | {"model.d_model": 2048}, False),
    ("NVIDIA H200", UNROLLED | {"step.scan_unroll": 1}, False),
    ("NVIDIA H200", UNROLLED | {"model.num_layers": 33}, False),  # a loop
    ("NVIDIA H200", UNROLLED | {"moe.num_experts": 8}, False),
    ("NVIDIA H200", MANY, True),
    ("NVIDIA H200", MANY | {"moe.num_experts": 63}, False),
    ("cpu", UNROLLED, False),
    ("cpu", MANY, False),
  ],
)
def test_triton_is_not_timed_where_it_wins_nothing(kind, settings, wanted):
  options = compiler.default_options(tiny_config(settings), device_of(kind))
  assert (options.get("xla_gpu_enable_triton_gemm") == "false") == wanted
  asked = {"xla_gpu_enable_triton_gemm": "true"}  # the run's own word goes before
  found = compiler_options(
    tiny_config(settings | {"step.compiler_options": asked}), device_of(kind)
  )
  assert found["xla_gpu_enable_triton_gemm"] is True


@pytest.mark.parametrize(
  ("kind", "keeps", "wanted"),
  [("NVIDIA H200", True, "4"), ("NVIDIA H200", False, None), ("cpu", True, None)],
)
def test_several_collectives_are_on_their_way_where_gathered_weights_are_kept(kind, keeps, wanted):
  cfg = tiny_config({"mesh.fsdp": 2, "mesh.keep_gathered": keeps})
  limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
  assert compiler.default_options(cfg, device_of(kind)).get(limit) == wanted


@pytest.mark.parametrize(
  ("kind", "asked", "wanted"),
  [("NVIDIA H100", True, "COLLECTIVES_PEER_MEMORY"), ("NVIDIA H100", False, None),
   ("cpu", True, None)],
)  # fmt: skip
def test_permutations_are_copies_where_a_run_asks_for_it(kind, asked, wanted):
  cfg = tiny_config({"mesh.fsdp": 2, "mesh.copy_engines": asked})
  options = compiler.default_options(cfg, device_of(kind))
  for found in (options, compiler.evaluation_options(dict(options))):
    assert found.get("xla_gpu_collective_permute_mode") == wanted


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
