"""The shaders as differentiable functions of tensors on one Apple GPU.

Each takes what the op of the same name in `ats_jax.ops` takes, and gives the same result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from kernels_metal.library import shaders

LANES = 32
MAX_CHOICES = LANES
TINY = 1e-20  # no division by 0 where all scores vanish


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
  """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, with sums in float32.

  Args:
    x: [..., dim], float32, float16 or bfloat16.
    scale: [dim], of any float type.
    eps: added to the mean square.
  """
  return _RmsNorm.apply(x, scale, eps)


def rope(x_BTNH: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
  """Rotate each pair (i, i + head_dim/2) by its angle, in float32.

  Args:
    x_BTNH: queries or keys [batch, seq, heads, head_dim].
    cos_BTP: float32 [batch, seq, head_dim / 2]; no gradient.
    sin_BTP: like it.
  """
  return _Rope.apply(x_BTNH, cos_BTP, sin_BTP)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
  """`silu(gate) * up` in float32, element by element; both have one shape and dtype."""
  return _SwiGlu.apply(gate, up)


def route(
  logits: Tensor, selection: Tensor, top_k: int, score: str, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
  """Choose the `top_k` columns highest in `selection`; weigh them by the scores of `logits`.

  Args:
    logits: float32 [..., columns].
    selection: like it, without NaN; the lower column goes first among equals. No gradient.
    top_k: at most 32.
    score: "softmax" or "sigmoid".
    renormalize: divide the weights by their sum.
    scale: multiply them by this.

  Returns:
    Columns [..., top_k] int64, and their weights, float32.

  Raises:
    ValueError: if there are too many choices, or the logits are not float32.
  """
  if not 0 < top_k <= min(MAX_CHOICES, logits.shape[-1]):
    raise ValueError(
      f"top_k={top_k} of {logits.shape[-1]} columns: the Metal kernel chooses 1 to "
      f"{MAX_CHOICES}, and no more than there are."
    )
  if logits.dtype != torch.float32:
    raise ValueError(f"the Metal kernel routes by float32 logits, not {logits.dtype}.")
  return _Route.apply(logits, selection, top_k, score, renormalize, scale)


class _RmsNorm(Function):
  @staticmethod
  def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
    x, scale32 = x.contiguous(), scale.float().contiguous()
    y = torch.empty_like(x)
    ctx.save_for_backward(x, scale32)
    ctx.eps, ctx.scale_dtype = eps, scale.dtype
    run = shaders(x.dtype).rms_norm
    _launch(run, y, x, scale32, x.shape[-1], eps, **_rows(x, run))
    return y

  @staticmethod
  @once_differentiable
  def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
    x, scale32 = ctx.saved_tensors
    dy, width = grads[0].contiguous(), x.shape[-1]
    dx, normal = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    run = shaders(x.dtype).rms_norm_backward
    _launch(run, dx, normal, x, scale32, dy, width, ctx.eps, **_rows(x, run))
    dscale = (dy.float() * normal).reshape(-1, width).sum(0)
    return dx, dscale.to(ctx.scale_dtype), None


class _Rope(Function):
  @staticmethod
  def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    ctx.save_for_backward(cos, sin)
    return _rotate(x, cos, sin, 1.0)

  @staticmethod
  @once_differentiable
  def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    return _rotate(grads[0], cos, sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
  x = x.contiguous()
  y = torch.empty_like(x)
  heads, pairs = x.shape[-2], x.shape[-1] // 2
  angles = (a.float().contiguous() for a in (cos, sin))
  _launch(shaders(x.dtype).rope, y, x, *angles, heads, pairs, sign, threads=x.numel() // 2)
  return y


class _SwiGlu(Function):
  @staticmethod
  def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    ctx.save_for_backward(gate, up)
    y = torch.empty_like(gate)
    _launch(shaders(gate.dtype).swiglu, y, gate, up, threads=y.numel())
    return y

  @staticmethod
  @once_differentiable
  def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    dy = grads[0].contiguous()
    run = shaders(gate.dtype).swiglu_backward
    _launch(run, dgate, dup, gate, up, dy, threads=dy.numel())
    return dgate, dup


class _Route(Function):
  @staticmethod
  def forward(
    ctx: Any,
    logits: Tensor,
    selection: Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    scale: float,
  ) -> tuple[Tensor, Tensor]:
    logits, selection = logits.contiguous(), selection.float().contiguous()
    shape, tokens = (*logits.shape[:-1], top_k), logits.numel() // logits.shape[-1]
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weight = torch.empty(shape, dtype=torch.float32, device=logits.device)
    rule = (logits.shape[-1], top_k, int(score == "softmax"), int(renormalize), scale)
    size = {"threads": tokens * LANES, "group_size": LANES}
    _launch(shaders(torch.float32).route, chosen, weight, logits, selection, *rule, **size)
    columns = chosen.long()
    ctx.save_for_backward(logits, columns)
    ctx.score, ctx.renormalize, ctx.scale = score, renormalize, scale
    ctx.mark_non_differentiable(columns)
    return columns, weight

  @staticmethod
  @once_differentiable
  def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    logits, columns = ctx.saved_tensors
    scores = logits.softmax(-1) if ctx.score == "softmax" else logits.sigmoid()
    dchosen = ctx.scale * grads[1]
    if ctx.renormalize:
      chosen = scores.gather(-1, columns)
      total = chosen.sum(-1, keepdim=True) + TINY
      dchosen = (dchosen - (dchosen * chosen).sum(-1, keepdim=True) / total) / total
    dscores = torch.zeros_like(scores).scatter_(-1, columns, dchosen)
    if ctx.score == "softmax":
      dlogits = scores * (dscores - (dscores * scores).sum(-1, keepdim=True))
    else:
      dlogits = scores * (1 - scores) * dscores
    return dlogits, None, None, None, None, None


def _rows(x: Tensor, kernel: Any) -> dict[str, int]:
  """A threadgroup a row: enough SIMD groups for the row, no more than the kernel may have."""
  width = x.shape[-1]
  most = kernel.max_threads_per_threadgroup // LANES * LANES
  size = min(most, (width + LANES - 1) // LANES * LANES)
  return {"threads": x.numel() // width * size, "group_size": size}


def _launch(kernel: Any, *args: Tensor | int | float, threads: int, **size: int) -> None:
  if threads:  # Metal refuses an empty grid
    kernel(*args, threads=threads, **size)
