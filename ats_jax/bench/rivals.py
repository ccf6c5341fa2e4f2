"""The same computations in torch, eager and compiled, if it is there; imported when asked for."""

import functools
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ats_jax.ops.cases import Case

CALLS, REPEATS, WARMUP = 20, 5, 3


def versions() -> dict[str, str]:
  """The version of torch, if it can use the GPU that jax uses."""
  return {"torch": _torch().__version__} if _torch() else {}


@functools.cache
def _torch() -> Any:
  if jax.devices()[0].platform != "gpu" or importlib.util.find_spec("torch") is None:
    return None
  import torch

  if not torch.cuda.is_available():
    return None
  torch._dynamo.config.cache_size_limit = 64
  return torch


def torch_times(case: Case, pass_name: str) -> Iterator[tuple[str, float, int]]:
  """(name, seconds of a call, peak bytes beside the arguments) of each rival that exists."""
  torch = _torch()
  if torch is None or case.op not in FUNCTIONS:
    return
  torch._dynamo.reset()
  args = jax.tree.map(_to_torch, case.arguments(pass_name, 0))
  value = functools.partial(FUNCTIONS[case.op], torch, case)
  for name, f in (("torch eager", value), ("torch.compile", torch.compile(value, dynamic=False))):
    if name == "torch eager" and case.op == "attention" and " 1 segments" not in case.shape:
      continue  # it would hold seq x seq scores
    try:
      run = _gradients(torch, f, args, case.passes[pass_name].wrt)
      yield name, *_timed(torch, run)
    except (RuntimeError, torch.cuda.OutOfMemoryError) as e:
      print(f"# {case.op} {case.shape} {pass_name} {name}: {str(e).splitlines()[0][:160]}")
    torch.cuda.empty_cache()


def _to_torch(x: jax.Array) -> Any:
  torch = _torch()
  if not isinstance(x, jax.Array):
    return x
  if x.dtype == "bfloat16":
    host = np.asarray(x).view(np.int16)
    return torch.from_numpy(host.copy()).cuda().view(torch.bfloat16)
  return torch.from_numpy(np.array(x)).cuda()


def _gradients(torch: Any, f: Callable, args: tuple, wrt: tuple[int, ...]) -> Callable:
  """What one timed call does: the value, or the backward pass of a value computed before."""
  if not wrt:

    def value():
      with torch.no_grad():
        return f(*args)

    return value
  *args, cotangent = args
  args = [a.requires_grad_(True) if i in wrt else a for i, a in enumerate(args)]
  wanted = [args[i] for i in wrt]
  if f_needs_forward(cotangent):

    def both():
      return torch.autograd.grad(f(*args), wanted)

    return both
  out = f(*args)
  return lambda: torch.autograd.grad(out, wanted, cotangent, retain_graph=True)


def f_needs_forward(cotangent: Any) -> bool:
  """A loss is timed forward and backward, as ours, whose forward pass makes the gradients."""
  return cotangent.ndim == 0


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


def _swiglu(torch, case, gate, up):
  return torch.nn.functional.silu(gate) * up


def _rms_norm(torch, case, x, scale):
  return torch.nn.functional.rms_norm(x, scale.shape, scale, 1e-6)


def _rope(torch, case, x, table):
  cos, sin = table
  first, second = x.float().chunk(2, dim=-1)
  return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _routing(torch, case, logits, selection, valid):
  top_k = int(case.shape.split("top-")[1].split()[0])
  scores = logits.sigmoid() if "sigmoid" in case.shape else logits.softmax(-1)
  columns = selection.topk(top_k, dim=-1).indices
  weights = scores.gather(-1, columns)
  return weights / weights.sum(-1, keepdim=True)


def _sort(torch, case, expert):
  order = expert.flatten().argsort(stable=True)
  return order, order.argsort()


def _take_rows(torch, case, x, places):
  return x[places[0].long().clamp(max=x.shape[0] - 1)]


def _sum_rows(torch, case, y, weights, places):
  rows = y[places[2].long().clamp(max=y.shape[0] - 1)]
  return torch.einsum("nkd,nk->nd", rows.float(), weights).to(y.dtype)


def _cross_entropy(torch, case, x, head, targets, mask):
  logits = x.flatten(0, 1) @ head.T
  return torch.nn.functional.cross_entropy(logits.float(), targets.flatten().long())


def _adamw(torch, case, p, g, m, v):
  b1, b2, eps, decay, lr = 0.9, 0.95, 1e-8, 0.1, 3e-4
  g = g.float() * 0.5
  m32, v32 = b1 * m.float() + (1 - b1) * g, b2 * v.float() + (1 - b2) * g * g
  direction = (m32 / (1 - b1**10)) / ((v32 / (1 - b2**10)).sqrt() + eps) + decay * p.float()
  return (p.float() - lr * direction).to(p.dtype), m32.to(m.dtype), v32.to(v.dtype)


def _attention(torch, case, q, k, v, ids):
  heads_first = [a.transpose(1, 2) for a in (q, k, v)]
  if " 1 segments" in case.shape:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    y = sdpa(*heads_first, is_causal=True, enable_gqa=True)
  else:
    from torch.nn.attention.flex_attention import flex_attention

    y = flex_attention(*heads_first, block_mask=_block_mask(case, ids), enable_gqa=True)
  return y.transpose(1, 2)


@functools.cache
def _block_mask_of(shape: str, make: Callable) -> Any:
  return make()


def _block_mask(case, ids):
  from torch.nn.attention.flex_attention import create_block_mask

  same = lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k])
  batch, seq = ids.shape
  return create_block_mask(same, batch, None, seq, seq)


FUNCTIONS = {
  "swiglu": _swiglu,
  "rms_norm": _rms_norm,
  "rope": _rope,
  "routing": _routing,
  "sort_by_expert": _sort,
  "take_rows": _take_rows,
  "sum_rows": _sum_rows,
  "linear_cross_entropy": _cross_entropy,
  "adamw": _adamw,
  "attention": _attention,
}
