"""Triton's kernels as differentiable operators of PyTorch.

Importing this registers them as `torch.ops.ats_jax.attention` and `.grouped_matmul`, with their
shapes and gradients: `torch.compile` takes them as they are.

Letters: B batch, T seq, N query heads, K key/value heads, H head_dim, V width of a value; M rows, E
groups, D input width, F output width.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels_triton import plan
from kernels_triton.plan import Launch, Tile

_fitting: dict[tuple[Any, ...], Tile] = {}  # launch and device -> the first tile that fitted


@torch.library.custom_op("ats_jax::attention", mutates_args=())
def _attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  first: Tensor,
  last: Tensor,
  sinks: Tensor | None,
  soft_cap: float,
  in_parts: bool,
) -> tuple[Tensor, Tensor]:
  """Softmax attention of queries to runs of keys, scaled by head_dim^-1/2.

  Args:
    q: queries [B, T, N, H] in bfloat16 or float16.
    k: keys [B, T, K, H]; K divides N.
    v: values [B, T, K, V].
    first: int32 [B, T], the first key that a query sees; the last one is its own.
    last: int32 [B, T], the last query that sees a key. Neither falls along a row.
    sinks: float32 [N], a logit that every query of a head sees, with value 0; None = there is none.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; 0 = they stay as they are.
    in_parts: whether queries see few keys: rows of several documents, or a window.

  Returns:
    [B, T, N, V] in the dtype of the queries; the logarithms of the softmax's denominators, float32
    [B, N, T], which have no gradient.

  Raises:
    ValueError: for widths that the kernel does not take.
  """
  y, lse = _attention_like(q, k, v, first, last, sinks, soft_cap, in_parts)
  launch, _, _ = _launches(q, k, v, sinks, soft_cap, in_parts)
  given = lse.new_zeros(q.shape[2]) if sinks is None else sinks
  _run(launch, {"q": q, "k": k, "v": v, "first": first, "sinks": given}, {"y": y, "lse": lse})
  return y, lse


@torch.library.register_fake("ats_jax::attention")
def _attention_like(q, k, v, first, last, sinks, soft_cap, in_parts):
  del k, first, last, sinks, soft_cap, in_parts
  batch, seq, heads, _ = q.shape
  lse = q.new_empty((batch, heads, seq), dtype=torch.float32)
  return q.new_empty((batch, seq, heads, v.shape[-1])), lse


@torch.library.custom_op("ats_jax::attention_gradients", mutates_args=())
def _attention_gradients(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  first: Tensor,
  last: Tensor,
  dy: Tensor,
  lse: Tensor,
  delta: Tensor,
  soft_cap: float,
  in_parts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
  """Gradients of queries, keys and values."""
  dq, dk, dv = _gradients_like(q, k, v, first, last, dy, lse, delta, soft_cap, in_parts)
  _, of_keys, of_queries = _launches(q, k, v, None, soft_cap, in_parts)
  qkv, rest = {"q": q, "k": k, "v": v}, {"dy": dy, "lse": lse, "delta": delta}
  _run(of_keys, {**qkv, "last": last, **rest}, {"dk": dk, "dv": dv})
  _run(of_queries, {**qkv, "first": first, **rest}, {"dq": dq})
  return dq, dk, dv


@torch.library.register_fake("ats_jax::attention_gradients")
def _gradients_like(q, k, v, first, last, dy, lse, delta, soft_cap, in_parts):
  del first, last, dy, lse, delta, soft_cap, in_parts
  return tuple(a.new_empty(a.shape) for a in (q, k, v))


def _save_attention(ctx, inputs, output):
  q, k, v, first, last, sinks, ctx.soft_cap, ctx.in_parts = inputs
  ctx.save_for_backward(q, k, v, first, last, sinks, *output)


def _attention_backward(ctx, dy, dlse):
  del dlse  # nobody sees them
  q, k, v, first, last, sinks, y, lse = ctx.saved_tensors
  delta = torch.einsum("btnv,btnv->bnt", y.float(), dy.float())
  arrays = (q, k, v, first, last, dy, lse, delta)
  dq, dk, dv = _attention_gradients(*arrays, ctx.soft_cap, ctx.in_parts)
  dsinks = None
  if sinks is not None:  # its weight times (0 - y) . dy
    dsinks = -((sinks[:, None] - lse).exp() * delta).sum(dim=(0, 2))
  return dq, dk, dv, None, None, dsinks, None, None


torch.library.register_autograd(
  "ats_jax::attention", _attention_backward, setup_context=_save_attention
)


def _launches(q, k, v, sinks, soft_cap, in_parts) -> tuple[Launch, Launch, Launch]:
  has_sinks = sinks is not None
  return plan.attention(q.shape, k.shape, v.shape[-1], soft_cap, has_sinks, in_parts=in_parts)


@torch.library.custom_op("ats_jax::grouped_matmul", mutates_args=())
def _grouped_matmul(x: Tensor, w: Tensor, starts: Tensor, transposed: bool) -> Tensor:
  """`y[m] = x[m] @ w[g(m)]` for consecutive groups of rows, added in float32.

  Args:
    x: rows [M, D], sorted by group.
    w: one matrix a group [E, D, F], or [E, F, D] if `transposed`, in the same dtype.
    starts: int32 [E + 2], first row of each group, the row behind the last one, and M.
    transposed: multiply by transposed matrices; that has no gradient of its own.

  Returns:
    [M, F]; 0 in rows past the last group.
  """
  y = _product_like(x, w, starts, transposed)
  launch = plan.grouped_matmul(x.shape[0], w.shape, transposed=transposed, pairs=1)
  _run(launch, {"x": x, "w": w, "x_more": x, "w_more": w, "starts": starts}, {"y": y})
  return y


@torch.library.register_fake("ats_jax::grouped_matmul")
def _product_like(x, w, starts, transposed):
  del starts
  return x.new_empty((x.shape[0], w.shape[1 if transposed else 2]))


@torch.library.custom_op("ats_jax::grouped_weight_gradient", mutates_args=())
def _weight_gradient(x: Tensor, dy: Tensor, starts: Tensor) -> Tensor:
  """Of each group, its transposed rows times the gradients of its results."""
  dw = _weights_like(x, dy, starts)
  _run(plan.grouped_weight_gradient(*dw.shape), {"x": x, "dy": dy, "starts": starts}, {"dw": dw})
  return dw


@torch.library.register_fake("ats_jax::grouped_weight_gradient")
def _weights_like(x, dy, starts):
  return x.new_empty((starts.shape[0] - 2, x.shape[1], dy.shape[1]))


def _save_product(ctx, inputs, output):
  del output
  *arrays, ctx.transposed = inputs
  ctx.save_for_backward(*arrays)


def _product_backward(ctx, dy):
  assert not ctx.transposed
  x, w, starts = ctx.saved_tensors
  dx = _grouped_matmul(dy, w, starts, True) if ctx.needs_input_grad[0] else None
  dw = _weight_gradient(x, dy, starts) if ctx.needs_input_grad[1] else None
  return dx, dw, None, None


torch.library.register_autograd(
  "ats_jax::grouped_matmul", _product_backward, setup_context=_save_product
)


def _run(launch: Launch, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
  """Run a kernel with the first of its tiles that the GPU has the memory for.

  Raises:
    OutOfResources: there is none.
  """
  kernel = getattr(importlib.import_module(f"kernels_triton.{launch.module}"), launch.kernel)
  arrays = {name: a.contiguous() for name, a in inputs.items()} | outputs
  device = next(iter(outputs.values())).device
  constants = tuple(launch.constants.values())
  key = (launch.kernel, constants, *(a.dtype for a in arrays.values()), device)
  tiles = [_fitting[key]] if key in _fitting else launch.tiles
  for tile in tiles:
    how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    try:
      with torch.cuda.device_of(arrays["x" if "x" in arrays else "q"]):
        kernel[launch.grid(tile.blocks)](**arrays, **launch.constants, **tile.blocks, **how)
    except OutOfResources:
      if tile is tiles[-1]:
        raise
    else:
      _fitting[key] = tile
      return
