"""The CUDA kernels in the slots of the ops, through a C++ shim: contracts, meshes, a train step."""

import dataclasses
import functools
import re

import cuda_host
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
  kernels_of,
  make_test_mesh,
  micro_batches,
  named_leaves,
  random_rows,
  tiny_config,
)

from ats_jax.ops import implementations, registry, requirements
from ats_jax.ops.cross_entropy import HEAD_AXES, final_activation_axes, linear_cross_entropy
from ats_jax.ops.linear import linears
from ats_jax.ops.registry import XLA
from ats_jax.ops.remat import FP8_MAXIMA
from ats_jax.ops.requirements import Device
from ats_jax.ops.swiglu import swiglu
from ats_jax.sharding.apply import reshard
from ats_jax.step.program import make_program
from ats_jax.verbs.bench.cases import grouped_matmul_case, real_cases, toy_cases
from ats_jax.verbs.bench.measure import relative_errors
from kernels_cuda import library

HOPPER = Device("gpu", "9.0", "NVIDIA Test")
CUDA = {
  op: kernel
  for op, entry in implementations.OPS.items()
  for kernel in entry.kernels
  if kernel.name == "cuda"
}
# One case for each set of slots; further shapes are those of `test_cuda_kernels`.
PASSES = {
  (case.op, *of_pass.slots): (case, name)
  for case in reversed(toy_cases())
  if case.op in CUDA
  for name, of_pass in case.passes.items()
  if set(of_pass.slots) <= set(CUDA[case.op].where)
}.values()
# Both round to bfloat16 once, but may fall on different sides; float32 and integers are near exact.
BF16_ERROR, F32_ERROR = 3e-3, 1e-5


@pytest.fixture(autouse=True, scope="module")
def _host_library():
  cuda_host.host_library()


@pytest.fixture
def on_host(monkeypatch):
  """Let settings choose the kernels here, with or without nvcc."""
  monkeypatch.setattr(requirements, "nvidia", lambda *_: "")
  monkeypatch.setattr(requirements, "_no_library", lambda: "")
  monkeypatch.setenv("CUDA_TARGET_SM", "9.0")


def test_every_kernel_has_a_case():
  slots = {(case.op, slot) for case, name in PASSES for slot in case.passes[name].slots}
  assert slots == {(op, slot) for op, kernel in CUDA.items() for slot in kernel.where}


@pytest.mark.parametrize(("case", "name"), PASSES, ids=lambda x: getattr(x, "op", x))
def test_a_slot_takes_and_gives_what_xla_does(case, name):
  slots = kernels_of(case.op, "cuda")
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    args = case.arguments(name, seed=0)
    run = jax.jit(case.compute(name, slots))
    assert "ats_" in run.lower(*args).as_text()
    got, want = run(*args), jax.jit(case.compute(name, XLA))(*args)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(got) == shapes(want)
  errors = relative_errors(got, want)
  for error, x in zip(errors, jax.tree.leaves(want), strict=True):
    assert error <= (BF16_ERROR if x.dtype == jnp.bfloat16 else F32_ERROR)


def traced(case, slots):
  """The programs of all passes."""
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    arguments = lambda name: jax.eval_shape(functools.partial(case.arguments, name, 0))
    return [jax.jit(case.compute(n, slots)).trace(*arguments(n)) for n in case.passes]


def test_real_shapes_call_every_target_of_the_library():
  called = set()
  for case in (c for c in real_cases() if c.op in CUDA):
    for program in traced(case, kernels_of(case.op, "cuda")):
      text = program.lower(lowering_platforms=("cuda",)).as_text()  # without a GPU
      called.update(re.findall(r"@(ats_\w+)\(", text))
  assert called == set(library.TARGETS)


@pytest.mark.parametrize(("kernel", "tile"), [("cuda", ("block_n", 256)), ("mosaic", ("strip", 8))])
def test_tiles_reach_the_grouped_matmul(kernel, tile):
  case = grouped_matmul_case(1024, 4, 128, 256)
  slots = kernels_of("grouped_matmul", kernel)
  tiled = dataclasses.replace(slots, tiles=(tile,))
  pairs = zip(traced(case, slots), traced(case, tiled), strict=True)
  assert [str(a.jaxpr) != str(b.jaxpr) for a, b in pairs] == [True] * 3


def test_on_a_mesh_the_kernel_sees_blocks():
  draw = lambda i: jax.random.normal(jax.random.key(i), (8, 4, 32), jnp.bfloat16)
  want = jax.jit(jax.grad(lambda g, u: swiglu(g, u).astype(jnp.float32).sum()))(draw(0), draw(1))
  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    cut = [reshard(draw(i), "batch", "seq", "ff") for i in (0, 1)]
    f = jax.grad(lambda g, u: swiglu(g, u, kernels_of("swiglu", "cuda")).astype(jnp.float32).sum())
    assert "tensor<2x4x16xbf16>" in jax.jit(f).lower(*cut).as_text()
    got = jax.jit(f)(*cut)
  np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=1e-2)


@pytest.mark.thorough
def test_linear_layers_in_eight_bits_are_those_of_xla():
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
  policy = jax.checkpoint_policies.save_only_these_names(FP8_MAXIMA)
  axes = dict(inputs=("act_embed",), outputs=(("ff",), ("ff",), ("ff",)))

  def gradients(slots):
    def f(x, weights):
      results = linears(x, weights, **axes, fp8=True, kernels=slots)
      return sum((y.astype(jnp.float32) ** 2).sum() for y in results)

    run = jax.jit(jax.value_and_grad(jax.checkpoint(f, policy=policy), argnums=(0, 1)))
    x = reshard(draw(0, 8, 16, 48), "batch", "seq", None)
    weights = [reshard(draw(i, 48, 32 * i), "embed", "ff") for i in (1, 2, 3)]
    called = run.lower(x, weights).as_text().count("custom_call @ats_quantise")
    return called, jax.tree.map(lambda a: np.asarray(a, np.float32), run(x, weights))

  with jax.set_mesh(make_test_mesh(2, 2, 2)):
    (none, want), (called, got) = gradients(XLA), gradients(kernels_of("quantise", "cuda"))
  # Weights in both passes (the first one's results are not kept here), gradients, x once.
  assert (none, called) == (0, 3 + 3 + 3 + 1)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("shape", "calls"), [((8, 1, 1), True), ((2, 2, 2), False)])
def test_the_loss_is_that_of_xla(shape, calls):
  """With all that it weighs, the last chunk padded; where a row is cut, XLA runs."""
  rng = np.random.default_rng(0)
  targets = rng.integers(0, 40, (8, 6)).astype(np.int32)
  mask = (rng.random((8, 6)) < 0.7).astype(np.float32)
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)

  def run(slots, with_grads):
    def f(x, head):
      sums = linear_cross_entropy(x, head, targets, mask, 0.1, 0.2, 32, slots)
      return sums.objective, sums

    x, head = draw(0, 8, 6, 16), reshard(draw(1, 40, 16), *HEAD_AXES)
    x = reshard(x, *final_activation_axes(x))
    g = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True) if with_grads else f)
    called = "custom_call @ats_cross_entropy" in g.lower(x, head).as_text()
    return called, jax.tree.map(lambda a: np.asarray(a, np.float32), jax.tree.leaves(g(x, head)))

  with jax.set_mesh(make_test_mesh(*shape)):
    for with_grads in (False, True):
      called, got = run(kernels_of("linear_cross_entropy", "cuda"), with_grads)
      assert called == calls
      for a, b in zip(got, run(XLA, with_grads)[1], strict=True) if calls else ():
        np.testing.assert_allclose(np.linalg.norm(a - b), 0, atol=4e-3 * np.linalg.norm(b))


@pytest.mark.thorough
def test_training_with_all_of_them_follows_xla(on_host):
  changes = {
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "model.num_layers": 1,
    "model.qk_norm": True,
    "model.head_dim": 16,
    "precision.compute_dtype": "bfloat16",
    "data.seq_len": 24,  # of few rows not all of them run
  }
  found = {}
  with jax.set_mesh(make_test_mesh(1, 1, 1, expert=2)):
    for implementation in ("xla", "cuda"):
      slots = dict.fromkeys(CUDA, implementation)
      cfg = tiny_config(changes | {"ops.kernels": {"attention": "xla", **slots}})
      program = make_program(cfg)
      assert program.num.kernels.of("adamw", "update") == implementation
      state, values = program.init(), []
      batches = [micro_batches(random_rows(cfg, 8, seed=seed), 1) for seed in range(2)]
      text = program.train_step.lower(state, batches[0], program.training_rules(1)).as_text()
      called = {name for name in library.TARGETS if f"@{name}(" in text}
      # Nothing is in 8 bits here, and the loss is never without its gradient.
      others = {name for name in library.TARGETS if "quantise" in name} | {"ats_cross_entropy"}
      assert called == (set(library.TARGETS) - others if implementation == "cuda" else set())
      for batch in batches:
        state, metrics = program.train_step(state, batch, program.training_rules(1))
        values.append(np.asarray(metrics.values))
      found[implementation] = (
        values,
        {k: np.asarray(v) for k, v in named_leaves(state.opt_state).items()},
      )
  (want, want_state), (got, got_state) = found.values()
  np.testing.assert_allclose(got, want, rtol=2e-2)
  assert want_state.keys() == got_state.keys()  # so checkpoints go both ways
  for name, x in want_state.items():
    error = np.linalg.norm((got_state[name] - x).astype(np.float64))
    assert error <= 0.05 * np.linalg.norm(x.astype(np.float64)), name


@pytest.mark.parametrize(
  ("changes", "op", "message"),
  [
    ({"precision.compute_dtype": "float32"}, "swiglu", "needs bfloat16"),
    ({"model.d_ff": 100}, "swiglu", "divisible by 8, model.d_ff is 100"),
    ({"model.d_model": 8200}, "rms_norm", "rows of up to 8192"),
    ({"model.head_dim": 24}, "rope", "divisible by 16, model.head_dim is 24"),
    ({"moe.num_experts": 4, "moe.d_ff": 20}, "grouped_matmul", "divisible by 8, moe.d_ff is 20"),
    ({"mesh.tensor": 2}, "linear_cross_entropy", "whole rows of logits, mesh.tensor is 2"),
    ({"model.vocab_size": 50257}, "linear_cross_entropy", "by 4, model.vocab_size is 50257"),
    ({"model.vocab_size": 300_000}, "linear_cross_entropy", "up to 262144 logits"),
    ({"moe.num_experts": 300}, "routing", "up to 256 experts, there are 300"),
    ({"moe.num_experts": 16, "moe.top_k": 9}, "sum_rows", "up to 8 choices, moe.top_k is 9"),
  ],
)
def test_obstacles(on_host, changes, op, message):
  cfg = tiny_config({"precision.compute_dtype": "bfloat16", "ops.kernels": {op: "cuda"}} | changes)
  with pytest.raises(ValueError, match=f"{op}=cuda: .*{message}"):
    registry.choose_op(cfg, HOPPER, op)


@pytest.mark.parametrize("op", CUDA)
def test_a_missing_gpu_is_named_before_what_the_config_lacks(op):
  changes = {"precision.compute_dtype": "float32", "moe.num_experts": 300, "moe.top_k": 9}
  cfg = tiny_config(changes | {"ops.kernels": {op: "cuda"}})
  with pytest.raises(ValueError, match=f"{op}=cuda: the kernel runs on NVIDIA GPUs, this is cpu"):
    registry.choose_op(cfg, Device("cpu"), op)


def test_all_slots_of_the_grouped_matmul_are_filled(on_host):
  changes = {"moe.num_experts": 4, "precision.compute_dtype": "bfloat16"}
  cfg = tiny_config(changes | {"ops.kernels": {"grouped_matmul": "cuda"}})
  of_slots = registry.choose_op(cfg, HOPPER, "grouped_matmul")
  assert {choice.implementation for choice in of_slots.values()} == {"cuda"}


def test_the_loss_takes_the_kernel_where_the_library_is_needed_anyway(on_host):
  def choice(**changes):
    cfg = tiny_config({"precision.compute_dtype": "bfloat16"} | changes)
    return {str(c) for c in registry.choose_op(cfg, HOPPER, "linear_cross_entropy").values()}

  (dense,), (strict,) = choice(), choice(**{"ops.strict": True})  # not what strict is about
  assert dense == strict and re.search("xla .*no default for this config: nothing else", dense)
  eight_bits = {"precision.fp8": True, "model.num_layers": 4}
  for other in ({"moe.num_experts": 4}, eight_bits, {"ops.kernels": {"swiglu": "cuda"}}):
    (built,) = choice(**other)
    assert built.startswith("linear_cross_entropy: cuda (")
  (asked,) = choice(**{"ops.kernels": {"linear_cross_entropy": "cuda"}})
  assert asked.startswith("linear_cross_entropy: cuda (ops.kernels")
  (cut,) = choice(**{"moe.num_experts": 4, "mesh.tensor": 2, "ops.strict": True})
  assert re.search("xla .*whole rows", cut)


def test_the_loss_needs_a_library_for_its_gpu(on_host, monkeypatch):
  monkeypatch.setenv("CUDA_TARGET_SM", "8.0;8.6+PTX")
  cfg = tiny_config({"moe.num_experts": 4, "precision.compute_dtype": "bfloat16"})
  (choice,) = set(registry.choose_op(cfg, HOPPER, "linear_cross_entropy").values())
  assert choice.implementation == "xla" and "it is for 8.6 at most" in choice.reason


def test_an_old_gpu_is_refused():
  cfg = tiny_config({"ops.kernels": {"adamw": "cuda"}})
  with pytest.raises(ValueError, match=r"needs compute capability 7\.5, this GPU has 7\.0"):
    registry.choose_op(cfg, Device("gpu", "7.0"), "adamw")
  cfg = tiny_config(
    {"ops.kernels": {"grouped_matmul": "cuda"}, "precision.compute_dtype": "bfloat16"}
  )
  with pytest.raises(ValueError, match=r"needs compute capability 8\.0, this GPU has 7\.5"):
    registry.choose_op(cfg, Device("gpu", "7.5"), "grouped_matmul")
  with pytest.raises(ValueError, match=r"needs compute capability 9\.0 or .* this GPU has 8\.9"):
    cfg = tiny_config(
      {"ops.kernels": {"linear_cross_entropy": "cuda"}, "precision.compute_dtype": "bfloat16"}
    )
    registry.choose_op(cfg, Device("gpu", "8.9"), "linear_cross_entropy")


def test_without_nvcc_xla_runs_unless_the_kernel_is_asked_for(monkeypatch):
  def no_library():
    raise requirements.library.KernelsUnavailableError("CUDA kernels need nvcc")

  monkeypatch.setattr(requirements.library, "load", no_library)
  requirements._no_library.cache_clear()
  kernel = dataclasses.replace(CUDA["adamw"], default=("update",))
  monkeypatch.setitem(implementations.OPS, "adamw", implementations.Op(("update",), (kernel,)))
  choice = registry.choose_op(tiny_config(), HOPPER, "adamw")["update"]
  assert str(choice) == "adamw: xla (reference: CUDA kernels need nvcc)"
  with pytest.raises(ValueError, match="adamw=cuda: CUDA kernels need nvcc"):
    registry.choose_op(tiny_config({"ops.kernels": {"adamw": "cuda"}}), HOPPER, "adamw")
  with pytest.raises(registry.FallbackError, match="CUDA kernels need nvcc"):
    registry.choose_op(tiny_config({"ops.strict": True}), HOPPER, "adamw")
  requirements._no_library.cache_clear()
