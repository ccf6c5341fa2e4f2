"""The same computations in torch, eager and compiled, if it is there; imported when asked for."""

import functools
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging

from ats_jax.verbs.bench.cases import Case

CALLS, REPEATS, WARMUP = 20, 5, 3


def versions() -> dict[str, str]:
  """The version of torch, if it can use the GPU that jax uses."""
  return {"torch": _torch().__version__} if _torch() else {}


@functools.cache
def _torch() -> Any:
  if jax.devices()[0].platform != "gpu" or importlib.util.find_spec("torch") is None:
    return None
  try:
    torch = importlib.import_module("torch")
  except (ImportError, OSError) as e:  # its CUDA libraries beside those of jax
    logging.warning("torch cannot be imported: %s", e)
    return None
  if not torch.cuda.is_available():
    logging.warning("torch %s sees no GPU", torch.__version__)
    return None
  config: Any = importlib.import_module("torch._functorch.config")
  config.donated_buffer = False  # a backward pass is run many times
  return torch


def torch_times(case: Case, pass_name: str) -> Iterator[tuple[str, float, int]]:
  """(name, seconds of a call, peak bytes beside the arguments) of each rival that exists."""
  torch = _torch()
  if torch is None or case.op not in FUNCTIONS or "sinks" in case.shape or "cap" in case.shape:
    return
  torch._dynamo.reset()
  args = jax.tree.map(_to_torch, case.arguments(pass_name, 0))
  for name, (f, inputs) in FUNCTIONS[case.op](torch, case, args).items():
    try:
      yield name, *_timed(torch, _call(torch, f, inputs, case.passes[pass_name]))
    except RuntimeError as e:  # out of memory, or it does not compile: said, and on
      reason = str(e).strip().splitlines()
      logging.warning("%s %s %s %s: %s", case.op, case.shape, pass_name, name, reason[:1])
    torch.cuda.empty_cache()


def _to_torch(x: jax.Array) -> Any:
  torch = _torch()
  if x.dtype == "bfloat16":
    bits = np.asarray(jax.lax.bitcast_convert_type(x, "int16"))
    return torch.from_numpy(bits.copy()).cuda().view(torch.bfloat16)
  return torch.from_numpy(np.array(x)).cuda()


def _call(torch: Any, f: Callable, args: tuple, work: Any) -> Callable:
  """What one timed call does: the value, the backward pass of a value computed before, or both."""
  if not work.wrt:

    def value():
      with torch.no_grad():
        return f(*args)

    return value
  *inputs, cotangent = args
  for i in work.wrt:
    inputs[i] = inputs[i].detach().requires_grad_(True)
  wanted = [inputs[i] for i in work.wrt]
  if work.with_forward:
    return lambda: torch.autograd.grad(f(*inputs), wanted, cotangent)
  out = f(*inputs)
  return lambda: torch.autograd.grad(out, wanted, cotangent, retain_graph=True)


def _timed(torch: Any, run: Callable) -> tuple[float, int]:
  for _ in range(WARMUP):
    run()
  torch.cuda.synchronize()
  before = torch.cuda.memory_allocated()
  torch.cuda.reset_peak_memory_stats()
  run()
  torch.cuda.synchronize()
  peak = torch.cuda.max_memory_allocated() - before
  times = []
  for _ in range(REPEATS):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
      run()
    end.record()
    torch.cuda.synchronize()
    times.append(start.elapsed_time(end) / CALLS / 1e3)
  return statistics.median(times), peak


def _swiglu(torch, case):
  return lambda gate, up: torch.nn.functional.silu(gate) * up


def _rms_norm(torch, case):
  return lambda x, scale: torch.nn.functional.rms_norm(x, scale.shape, scale, 1e-6)


def _rope(torch, case):
  def rope(x, table):
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

  return rope


def _routing(torch, case):
  top_k, sigmoid = case.dims["top_k"], "sigmoid" in case.shape

  def route(logits, selection, valid):
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    columns = selection.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, columns)
    weights = weights / weights.sum(-1, keepdim=True)
    if weights.requires_grad:
      return weights
    load = torch.zeros_like(logits[:, 0]).scatter_add_(
      1, columns.flatten(1), valid[..., None].expand_as(columns).flatten(1).to(logits.dtype)
    )
    return weights, columns, load

  return route


def _sort(torch, case):
  experts = case.dims["experts"]

  def sort(expert):
    flat = expert.flatten()
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=experts)
    return order // expert.shape[1], order, order.argsort(), sizes

  return sort


def _take_rows(torch, case):
  return lambda x, places: x[places[0].clamp(max=x.shape[0] - 1)]


def _sum_rows(torch, case):
  def combine(y, weights, places):
    rows = y[places[2].clamp(max=y.shape[0] - 1)]
    return (rows * weights[..., None]).sum(1).to(y.dtype)

  return combine


def _cross_entropy(torch, case):
  def loss(x, head, targets, mask):
    logits = x.flatten(0, 1) @ head.T
    return torch.nn.functional.cross_entropy(logits.float(), targets.flatten().long())

  return loss


def _adamw(torch, case):
  b1, b2, eps, decay, lr = 0.9, 0.95, 1e-8, 0.1, 3e-4

  def update(p, g, m, v):
    g = g.float() * 0.5
    m32, v32 = b1 * m.float() + (1 - b1) * g, b2 * v.float() + (1 - b2) * g * g
    direction = (m32 / (1 - b1**10)) / ((v32 / (1 - b2**10)).sqrt() + eps) + decay * p.float()
    p = (p.float() - lr * direction).to(p.dtype)
    return p, m32.to(m.dtype), v32.to(v.dtype), (direction * direction).sum()

  return update


def _attention(torch, case, args):
  """FlashAttention-2 where a row is one document, and FlexAttention, which is in Triton."""
  ids = args[4]
  nn = importlib.import_module("torch.nn.attention")
  flex = importlib.import_module("torch.nn.attention.flex_attention")
  sdpa = torch.nn.functional.scaled_dot_product_attention
  window = case.dims.get("window")

  def flash(q, k, v, *rest):
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    with nn.sdpa_kernel(nn.SDPBackend.FLASH_ATTENTION):
      return sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

  def seen(b, h, q, k):
    near = (q >= k) if window is None else (q >= k) & (q - k < window)
    return near & (ids[b, q] == ids[b, k])

  batch, seq = ids.shape
  mask = flex.create_block_mask(seen, batch, None, seq, seq)

  def flexible(q, k, v, *rest):
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    return flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

  found = {"FlexAttention": (torch.compile(flexible, dynamic=False), args)}
  if " 1 segments" in case.shape and window is None:
    found["FlashAttention-2"] = flash, args
  return found


def _both(of):
  """A function of torch as it is, and compiled."""

  def functions(torch, case, args):
    value = of(torch, case)
    compiled = torch.compile(value, dynamic=False)
    return {"torch eager": (value, args), "torch.compile": (compiled, args)}

  return functions


FUNCTIONS = {
  "swiglu": _both(_swiglu),
  "rms_norm": _both(_rms_norm),
  "rope": _both(_rope),
  "routing": _both(_routing),
  "sort_by_expert": _both(_sort),
  "take_rows": _both(_take_rows),
  "sum_rows": _both(_sum_rows),
  "linear_cross_entropy": _both(_cross_entropy),
  "adamw": _both(_adamw),
  "attention": _attention,
}
