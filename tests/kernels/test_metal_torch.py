"""The Metal shaders as functions of tensors, forward and backward, against plain PyTorch.

The shaders run on the CPU, see metal_host.py; all else is what runs on an Apple GPU.
"""

import types

import metal_host
import pytest

torch = pytest.importorskip("torch")

from bridge import torch_cases  # noqa: E402

from ats_jax.pytorch import layers, metal, moe  # noqa: E402
from ats_jax.pytorch.settings import RoutingRules  # noqa: E402
from kernels_metal import library, ops  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("mesh")]

BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
  monkeypatch.setattr(torch.mps, "compile_shader", metal_host.compile_shader)
  library.shaders.cache_clear()
  yield
  library.shaders.cache_clear()


def random(seed, *shape, dtype=torch.float32):
  values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
  return values.to(dtype).requires_grad_()


def compare(function, reference, args, dtype):
  """Values and gradients of both for one random cotangent."""
  results = []
  for f in (function, reference):
    leaves = [a.detach().clone().requires_grad_() for a in args]
    y = f(*leaves)
    dy = random(99, *y.shape).to(y.dtype).detach()
    results.append([y, *torch.autograd.grad(y, leaves, dy)])
  for got, want in zip(*results, strict=True):
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error <= BOUND[dtype], error


dtypes = pytest.mark.parametrize("dtype", BOUND)


@dtypes
def test_rms_norm(dtype, monkeypatch):
  def plain(x, scale):
    wide = x.float()
    rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (wide * rms * scale.float()).to(x.dtype)

  args = random(0, 2, 3, 70, dtype=dtype), random(1, 70, dtype=dtype)
  compare(lambda x, s: ops.rms_norm(x, s, 1e-5), plain, args, dtype)
  # A row wider than a threadgroup has threads, of a kernel that may have fewer than others.
  for kernel in (library.shaders(dtype).rms_norm, library.shaders(dtype).rms_norm_backward):
    monkeypatch.setattr(kernel, "max_threads_per_threadgroup", 200)
  args = random(0, 2, 1100, dtype=dtype), random(1, 1100)
  compare(lambda x, s: ops.rms_norm(x, s, 1e-5), plain, args, dtype)


@dtypes
def test_rope(dtype):
  angle = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
  cos, sin = angle.cos(), angle.sin()

  def plain(x):
    a, b = x.float().chunk(2, -1)
    c, s = cos[:, :, None], sin[:, :, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

  compare(lambda x: ops.rope(x, cos, sin), plain, [random(0, 2, 5, 4, 6, dtype=dtype)], dtype)
  # Not contiguous: heads before positions.
  turned = lambda f: lambda x: f(x.transpose(1, 2))
  x = random(0, 2, 4, 5, 6, dtype=dtype)
  compare(turned(lambda x: ops.rope(x, cos, sin)), turned(plain), [x], dtype)


@dtypes
def test_swiglu(dtype):
  plain = lambda g, u: (torch.nn.functional.silu(g.float()) * u.float()).to(g.dtype)
  compare(ops.swiglu, plain, [random(s, 3, 35, dtype=dtype) for s in (0, 1)], dtype)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(score, renormalize):
  logits = random(0, 2, 9, 13)
  selection = (logits + random(1, 2, 9, 13)).detach()
  want_columns = selection.topk(4, dim=-1).indices

  def plain(logits):
    weight = (logits.softmax(-1) if score == "softmax" else logits.sigmoid()).gather(
      -1, want_columns
    )
    return 2.5 * (weight / weight.sum(-1, keepdim=True) if renormalize else weight)

  rule = (4, score, renormalize, 2.5)
  compare(lambda x: ops.route(x, selection, *rule)[1], plain, [logits], torch.float32)
  columns, weight = ops.route(logits, selection, *rule)
  assert torch.equal(columns, want_columns)
  assert not columns.requires_grad and weight.requires_grad


def test_nothing_is_launched_for_no_rows():
  assert ops.swiglu(random(0, 0, 8), random(0, 0, 8)).shape == (0, 8)
  assert ops.rms_norm(random(0, 0, 8), random(0, 8), 1e-5).shape == (0, 8)


def test_what_cannot_run_is_named():
  with pytest.raises(ValueError, match="top_k=33 of 64 columns: the Metal kernel chooses 1 to 32"):
    ops.route(random(0, 1, 64), random(1, 1, 64), 33, "softmax", True, 1.0)
  with pytest.raises(ValueError, match=r"float32 logits, not torch\.float16"):
    ops.route(random(0, 1, 8, dtype=torch.float16), random(1, 1, 8), 2, "softmax", True, 1.0)
  with pytest.raises(ValueError, match=r"not torch\.float64"):
    ops.swiglu(random(0, 8, dtype=torch.float64), random(1, 8, dtype=torch.float64))


def test_without_metal_the_way_out_is_named(monkeypatch):
  monkeypatch.undo()  # PyTorch's own compile_shader, which needs a Mac
  with pytest.raises(RuntimeError, match="MPS is not available\nATS_METAL=off runs PyTorch's own"):
    ops.swiglu(random(0, 8), random(1, 8))


def test_they_run_on_mps_unless_switched_off(monkeypatch, caplog):
  of_mps = types.SimpleNamespace(device=torch.device("mps"))
  metal.shaders.cache_clear()
  with caplog.at_level("INFO"):
    assert metal.shaders_for(random(0, 1)) is None
    assert metal.shaders_for(of_mps) is ops
    monkeypatch.setenv("ATS_METAL", "off")
    metal.shaders.cache_clear()
    assert metal.shaders_for(of_mps) is None
  metal.shaders.cache_clear()
  assert [r.message for r in caplog.records] == [
    "on mps with Metal shaders; ATS_METAL=off for PyTorch's own operations",
    "on mps without Metal shaders: ATS_METAL=off",
  ]


@pytest.mark.parametrize("name", ["dense", "moe-groups", "hybrid"])
def test_a_model_computes_the_same_with_them(name, monkeypatch):
  results = []
  for found in (None, ops):
    for module in (layers, moe):
      monkeypatch.setattr(module, "shaders_for", lambda x, found=found: found)
    cfg, _, model = torch_cases.both(name)
    _, batch = torch_cases.batch(cfg)
    x_BTD, _, _ = model(
      batch["tokens"],
      positions_BT=batch["positions"],
      segment_ids_BT=batch["segment_ids"],
      rules=RoutingRules(training=True, capacity=0.5),
    )
    logits = model.logits(x_BTD)
    model.zero_grad()
    logits.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    results.append((logits.detach(), grads))
  (got, grads), (want, wanted) = results
  torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
  assert grads.keys() == wanted.keys() and grads
  for parameter, grad in grads.items():
    error = (grad - wanted[parameter]).norm() / (wanted[parameter].norm() + 1e-9)
    assert error < 1e-4, parameter
