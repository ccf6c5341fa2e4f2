"""Which ops exist, the implementations of each, and which one runs by default and why.

A slot is one computation of an op: its forward pass, its backward pass or a part of that. Every
slot can run XLA's version, which stands in the op's own file and is the specification.
docs/reference/kernels.md says what each slot takes and gives, and how to add a kernel. AGENTS.md
says how to add an op.
"""

import dataclasses
from collections.abc import Callable, Mapping

from ats_jax.config.schema import Config
from ats_jax.config.schema.setting import Condition, when
from ats_jax.ops import megablox, requirements
from ats_jax.ops.attention import chunked, cudnn, splash, triton
from ats_jax.ops.requirements import Device
from kernels_cuda import (
  adamw,
  cross_entropy,
  grouped_matmul,
  quantise,
  rms_norm,
  rope,
  routing,
  rows,
  swiglu,
)
from kernels_pallas.grouped_matmul import slots as mosaic
from kernels_triton import decode_slots
from kernels_triton import slots as triton_slots

# cuDNN's attention takes time for each document that a row may hold. In rows of 4,096 tokens of one
# document it was faster than Triton's if they may hold 16, and slower with 64; so the limit is set
# to 32 of them (docs/lab/records/attention_packed.csv). Other lengths were not measured.
TOKENS_OF_DOCUMENT = 128


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A hand-written (or library) implementation of one or more slots of an op.

  Attributes:
    name: what settings and logs call it.
    where: slot -> the function.
    default: the slots in which it runs wherever it can.
    why: the measurement behind that, or behind its not being a default. Logged.
    obstacle: `(cfg, device)` -> why it cannot run, "" if it can.
    tiles: keyword of the function -> the values that `bench tune` tries, the default first.
    reserve: `(cfg, device)` -> why it is no default for a config after all, "" if it is.
    is_xla: made of XLA's own operations, so no fast implementation to `ops.strict`.
    platform: for which it is; XLA's run on others too.
  """

  name: str
  where: Mapping[str, Callable]
  default: tuple[str, ...]
  why: str
  obstacle: Callable[[Config, Device], str]
  tiles: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  reserve: Callable[[Config, Device], str] = lambda cfg, device: ""
  is_xla: bool = False
  platform: str = "gpu"


@dataclasses.dataclass(frozen=True)
class Op:
  """Its slots, and the kernels that can run there beside "xla".

  Attributes:
    slots: their names.
    kernels: the preferred first.
    used_by: what a config must be for its runs to use the op; None = all do.
    generates: it is used by the inference engine, and by no training.
    first: slot -> the kernel that is preferred to all others there.
  """

  slots: tuple[str, ...]
  kernels: tuple[Kernel, ...] = ()
  used_by: Condition | None = None
  generates: bool = False
  first: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def preferred(self, slot: str) -> list[Kernel]:
    """The kernels in the order in which a slot tries them."""
    return sorted(self.kernels, key=lambda kernel: kernel.name != self.first.get(slot))

  def is_used(self, cfg: Config) -> bool:
    """Whether training runs of a config use it."""
    return not self.generates and (self.used_by is None or self.used_by.is_met(cfg))


FORWARD_BACKWARD = ("forward", "backward")
# Of few rows, as in generation, XLA's join with what is around them: at 9.23B on an H200 one stream
# is 1.04 times as fast, 64 are 1.01 times (docs/lab/records/decode.csv).
OF_ROWS = ("forward", "few_rows", "backward")
OF_GROUPS = ("forward", "few_rows", "input_gradient", "weight_gradient")
OF_EXPERTS = when("moe.num_experts")
OF_8_BITS = when("precision.fp8")


def op(
  slots: tuple[str, ...], *kernels: Kernel, used_by: Condition | None = None, **first: str
) -> Op:
  """An op with the kernels that can run in its slots, the preferred first; slot=its own first."""
  return Op(slots, kernels, used_by, first=first)


def cuda_kernel(
  obstacle: Callable[[Config, Device], str],
  why: str,
  *,
  default: bool = False,
  tiles: Mapping[str, tuple[int, ...]] | None = None,
  reserve: Callable[[Config, Device], str] = lambda cfg, device: "",
  **where: Callable,
) -> Kernel:
  """One of `kernels_cuda`; slot=function, run by default in all slots or in none."""
  slots = tuple(where) if default else ()
  return Kernel("cuda", where, slots, why, obstacle, tiles or {}, reserve)


def cudnn_reserve(cfg: Config, device: Device) -> str:
  """Why cuDNN's attention is no default for a config, "" if it is.

  It takes time for each document that a row may hold, as Triton's does not: measured on Hopper.
  """
  documents, seq_len = cfg.data.max_segments, cfg.data.seq_len
  if device.capability != "9.0" or seq_len > TOKENS_OF_DOCUMENT * documents:
    return ""
  if requirements.triton_attention(cfg, device):
    return ""
  return f"data.max_segments={documents} are many documents for rows of data.seq_len={seq_len}"


def cross_entropy_reserve(cfg: Config, device: Device) -> str:
  """Why the loss's kernel is no default for a config, "" if it is.

  Where another op of this run has a default of the CUDA library, that is built anyway. For this
  slot alone, the first start would have to wait for the build. A sharded vocabulary always runs
  XLA.
  """
  del device
  others = (op for name, op in OPS.items() if name != "linear_cross_entropy" and op.is_used(cfg))
  is_built = any(kernel.name == "cuda" and kernel.default for op in others for kernel in op.kernels)
  if not is_built and "cuda" not in cfg.ops.kernels.values():
    return "nothing else here needs the CUDA library, whose build takes half a minute"
  return requirements.rows_of_logits(cfg)


OPS: dict[str, Op] = {
  "attention": op(
    # Differentiable: the statistics between its passes have each kernel's own layout.
    ("forward",),
    Kernel(
      "cudnn",
      {"forward": cudnn.flash_attention},
      default=("forward",),
      why="flash attention, the fastest measured on Hopper",
      obstacle=requirements.cudnn_attention,
      reserve=cudnn_reserve,
    ),
    Kernel(
      "triton",
      {"forward": triton.flash_attention},
      default=("forward",),
      why="1.0 to 1.3 times FlexAttention's speed on an H200, heads of 128, both passes",
      obstacle=requirements.triton_attention,
    ),
    Kernel(
      "splash",
      {"forward": splash.flash_attention},
      default=("forward",),
      why="flash attention for TPUs, of JAX; compiled for v5e and v6e, and not run",
      obstacle=requirements.splash_attention,
      reserve=lambda cfg, device: chunked.reserve(cfg),
      platform="tpu",
    ),
    Kernel(
      "chunked",
      {"forward": chunked.chunked_attention},
      default=("forward",),
      why="XLA's, without scores of seq x seq",
      obstacle=lambda cfg, device: "",
      reserve=lambda cfg, device: chunked.reserve(cfg),
      is_xla=True,
    ),
  ),
  "grouped_matmul": op(
    OF_GROUPS,
    Kernel(
      "mosaic",
      {
        "forward": mosaic.forward,
        "few_rows": mosaic.forward,
        "input_gradient": mosaic.input_gradient,
        "weight_gradient": mosaic.weight_gradient,
      },
      default=OF_GROUPS,
      why="the fastest measured on Hopper",
      obstacle=requirements.mosaic_grouped_matmul,
      tiles={"block_m": (128, 256), "block_n": (256, 128), "stages": (4, 3), "strip": (16, 8)},
    ),
    Kernel(
      "triton",
      {
        "forward": triton_slots.forward,
        "few_rows": triton_slots.forward,
        "input_gradient": triton_slots.input_gradient,
        "weight_gradient": triton_slots.weight_gradient,
      },
      default=OF_GROUPS,
      why="of many rows 0.79 to 0.96 of the speed of mosaic on an H200, 1.3 to 1.6 times that of "
      "cuda; of 2, 8, 32 and 64 rows, as in generation, 1.86, 1.30, 1.08 and 1.08 times that of "
      "mosaic for experts of 2,048 x 7,168 (docs/lab/records/few_rows.csv)",
      obstacle=requirements.triton,
    ),
    cuda_kernel(
      requirements.cuda_grouped_matmul,
      "mosaic takes 0.51 to 0.71 of its time on an H200, triton 0.61 to 0.76",
      tiles={"block_n": (128, 256)},
      forward=grouped_matmul.grouped_matmul,
      few_rows=grouped_matmul.grouped_matmul,
      input_gradient=grouped_matmul.grouped_matmul_dx,
      weight_gradient=grouped_matmul.grouped_matmul_dw,
    ),
    Kernel(
      "megablox",
      {
        "forward": megablox.forward,
        "few_rows": megablox.forward,
        "input_gradient": megablox.input_gradient,
        "weight_gradient": megablox.weight_gradient,
      },
      default=OF_GROUPS,
      why="for TPUs, of JAX; 0 to 0.7 GiB of temporary arrays where XLA's version, which copies "
      "weights, has 4.3 to 7.1; compiled for v5e and v6e, and not run",
      obstacle=requirements.megablox,
      platform="tpu",
    ),
    used_by=OF_EXPERTS,
    few_rows="triton",
  ),
  "swiglu": op(
    FORWARD_BACKWARD,
    cuda_kernel(
      requirements.cuda_swiglu,
      "0.88 to 1.02 of XLA's speed on an H200",
      forward=swiglu.swiglu,
      backward=swiglu.swiglu_backward,
    ),
  ),
  "rms_norm": op(
    FORWARD_BACKWARD,
    cuda_kernel(
      requirements.cuda_rms_norm,
      "backward 1.5 to 1.9, forward 0.99 to 1.06 times XLA's speed on an H200, but a step of "
      "1.5B took 0.9 % longer with backward (once each), perhaps as XLA joins norms with others",
      forward=rms_norm.rms_norm,
      backward=rms_norm.rms_norm_backward,
    ),
  ),
  "rope": op(
    FORWARD_BACKWARD,
    cuda_kernel(
      requirements.cuda_rope,
      "0.82 to 0.95 of XLA's speed on an H200",
      forward=rope.rope,
      backward=rope.rope,
    ),
  ),
  "quantise": op(
    ("transposed", "both"),
    cuda_kernel(
      requirements.cuda_quantise,
      "1.5 to 1.6 times XLA's speed on an H200, and arrays keep their layouts around it",
      default=True,
      transposed=quantise.transposed,
      both=quantise.both,
    ),
    used_by=OF_8_BITS,
  ),
  "routing": op(
    FORWARD_BACKWARD,
    cuda_kernel(
      requirements.cuda_routing,
      "1.8 to 5.3 times XLA's speed on an H200",
      default=True,
      forward=routing.choose,
    ),
    used_by=OF_EXPERTS,
  ),
  "sort_by_expert": op(
    ("forward",),
    cuda_kernel(
      requirements.cuda_routing,
      "23 to 27 times XLA's speed on an H200",
      default=True,
      forward=routing.sort_by_expert,
    ),
    used_by=OF_EXPERTS,
  ),
  "take_rows": op(
    OF_ROWS,
    cuda_kernel(
      requirements.cuda_rows,
      "forward 1.36 to 1.48, backward 0.97 to 1.16 of XLA's speed on an H200",
      default=True,
      forward=rows.take_rows,
      backward=rows.take_rows_backward,
    ),
    used_by=OF_EXPERTS,
  ),
  "sum_rows": op(
    OF_ROWS,
    cuda_kernel(
      requirements.cuda_rows,
      "0.96 to 1.12 of XLA's speed on an H200",
      default=True,
      forward=rows.sum_rows,
      backward=rows.sum_rows_backward,
    ),
    used_by=OF_EXPERTS,
  ),
  "linear_cross_entropy": op(
    ("value", "gradient"),  # of some tokens, between the matmuls, while their logits exist
    cuda_kernel(
      requirements.cuda_cross_entropy,
      "1.9 to 2.2 times XLA's speed on an H200, 0.8 to 1.0 % of a step",
      default=True,
      reserve=cross_entropy_reserve,
      value=cross_entropy.cross_entropy,
      gradient=cross_entropy.cross_entropy_gradient,
    ),
  ),
  "adamw": op(
    ("update",),
    cuda_kernel(
      requirements.cuda_adamw,
      "0.97 to 1.02 of XLA's speed on an H200",
      update=adamw.adamw,
    ),
    used_by=when("optimizer.name", "adamw"),
  ),
  "paged_attention": Op(
    ("one_token", "one_token_int8", "one_token_fp8"),
    (
      Kernel(
        "triton",
        {
          "one_token": decode_slots.paged_attention,
          "one_token_int8": decode_slots.paged_attention_int8,
          "one_token_fp8": decode_slots.paged_attention_fp8,
        },
        default=("one_token", "one_token_int8", "one_token_fp8"),
        why="on an H200 1.11 times XLA's tokens/s in one stream of 1.5B; with 64 of 1,024 cached "
        "1.82 times in bfloat16 and 1.41 times in fp8; with 64 prompts of 4,096, and their "
        "reading, 1.23 times in int8",
        obstacle=requirements.triton_paged_attention,
      ),
    ),
    generates=True,
  ),
}
