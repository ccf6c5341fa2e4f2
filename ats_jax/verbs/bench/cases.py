"""Each op that has tiles to tune at shapes of real models; `lab.ops` takes them from here.

A case is a function `f(kernels, *args)` with its arguments; a pass is what is computed of it: its
value, or some of its gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.ops.adamw import UpdateScalars, adamw_update
from ats_jax.ops.cross_entropy import HEAD_AXES, final_activation_axes, linear_cross_entropy
from ats_jax.ops.dispatch import sort_by_expert, sum_rows, take_rows
from ats_jax.ops.grouped_matmul import grouped_matmul
from ats_jax.ops.quantise import E4M3, E5M2, cast_and_transpose, cast_transposed
from ats_jax.ops.registry import Kernels
from ats_jax.ops.rms_norm import rms_norm
from ats_jax.ops.rope import rope, rope_table
from ats_jax.ops.routing import RoutingRule, route
from ats_jax.ops.swiglu import swiglu
from ats_jax.sharding.apply import reshard
from kernels_triton.plan import FEW_ROWS


@dataclasses.dataclass(frozen=True)
class Pass:
  """What is computed of a case.

  Attributes:
    slots: of the op that it runs.
    wrt: the arguments that gradients are taken of; () = the value.
    bytes: least that must be moved, each input read once and each result written once.
    flops: multiplications and additions of its matmuls.
    with_forward: it holds the forward pass too, as the gradients cannot be had without it.
  """

  slots: tuple[str, ...]
  wrt: tuple[int, ...]
  bytes: float
  flops: float = 0.0
  with_forward: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
  """One op at one shape. Run it under a mesh.

  Attributes:
    op: of `implementations.OPS`.
    shape: its sizes in words.
    dims: the sizes by which tuning tables keep it (`registry.kernel`).
    f: `(kernels, *args)` -> results; the first floating-point one is differentiated.
    make: draws the arguments; fresh ones for each seed.
    passes: by name.
    rivals: other jax functions `(*args)` of the value pass, e.g. the library's nearest.
    has_xla: False where XLA's version does not fit in memory; then it is checked at `check`.
    check: the same case at a size where float32 XLA fits; None = this one.
    cfg: a run with the case's options, of which kernels say whether they can run.
    feed: `(args, results)` -> the next call's arguments, of an op that works in place.
  """

  op: str
  shape: str
  dims: Mapping[str, int]
  f: Callable
  make: Callable[[int], tuple]
  passes: Mapping[str, Pass]
  rivals: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
  has_xla: bool = True
  check: "Case | None" = None
  feed: Callable | None = None
  cfg: Config = dataclasses.field(default_factory=Config)

  def compute(self, pass_name: str, kernels: Kernels) -> Callable:
    """The function `(*args, *cotangents)` of a pass."""
    of_pass = self.passes[pass_name]
    value = functools.partial(self.f, kernels)
    if not of_pass.wrt:
      return value

    def gradients(args, cotangent):
      def of(*parts):
        full = list(args)
        for i, part in zip(of_pass.wrt, parts, strict=True):
          full[i] = part
        return first_float(value(*full))

      y, pullback = jax.vjp(of, *(args[i] for i in of_pass.wrt))
      return pullback(jax.reshard(cotangent, jax.typeof(y).sharding.spec))

    return lambda *args: gradients(args[:-1], args[-1])

  def arguments(self, pass_name: str, seed: int) -> tuple:
    """What `compute(pass_name, ...)` takes."""
    args = self.make(seed)
    if not self.passes[pass_name].wrt:
      return args
    shape = jax.eval_shape(lambda *a: first_float(self.f(Kernels(), *a)), *args)
    if not shape.shape:
      return *args, jnp.ones((), shape.dtype)
    return *args, normal(seed + 1000, shape.shape, shape.dtype)


def first_float(results) -> jax.Array:
  """The first floating-point array of some results: what gradients are taken of."""
  return next(x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def normal(seed: int, shape: tuple[int, ...], dtype=jnp.bfloat16, std: float = 1.0) -> jax.Array:
  """Random values, never zeros: those hide errors and run faster."""
  return (std * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def uneven(rows: int, groups: int, kind: str = "uneven") -> np.ndarray:
  """Sizes of groups: "uneven", "one" with 90 %, "empty" for a third of them."""
  share = np.random.default_rng(0).dirichlet(np.full(groups, 5.0))
  if kind == "one":
    share = np.full(groups, 0.1 / max(1, groups - 1))
    share[0] = 0.9
  if kind == "empty":
    share[::3] = 0
  share = share / share.sum()
  ends = np.round(np.cumsum(share) * rows).astype(np.int32)
  return np.diff(ends, prepend=0).astype(np.int32)


def both_ways(forward: float, backward: float, wrt: tuple[int, ...]) -> dict[str, Pass]:
  """A forward and a backward pass that move so many bytes."""
  return {
    "forward": Pass(("forward",), (), forward),
    "backward": Pass(("backward",), wrt, backward),
  }


def swiglu_case(rows: int, d_ff: int) -> Case:
  """Reads 2, writes 1; backward reads 3, writes 2 arrays."""
  size = 2 * rows * d_ff
  return Case(
    "swiglu",
    f"{rows} x {d_ff}",
    dict(rows=rows, d_ff=d_ff),
    lambda kernels, gate, up: swiglu(gate, up, kernels),
    lambda seed: tuple(normal(seed + i, (rows, d_ff)) for i in range(2)),
    both_ways(3 * size, 5 * size, wrt=(0, 1)),
  )


def rms_norm_case(rows: int, dim: int) -> Case:
  """Reads 1, writes 1; backward reads 2, writes 1 array."""
  size = 2 * rows * dim
  return Case(
    "rms_norm",
    f"{rows} x {dim}",
    dict(rows=rows, dim=dim),
    lambda kernels, x, scale: rms_norm(x, scale, eps=1e-6, kernels=kernels),
    lambda seed: (normal(seed, (rows, dim)), 1 + normal(seed + 1, (dim,), std=0.1)),
    both_ways(2 * size, 3 * size, wrt=(0, 1)),
  )


def quantise_case(rows: int, columns: int, slot: str, dtype=E4M3) -> Case:
  """Reads 2 bytes an element, writes 1 for each result."""
  f = cast_transposed if slot == "transposed" else cast_and_transpose
  moved = (3 if slot == "transposed" else 4) * rows * columns
  return Case(
    "quantise",
    f"{rows} x {columns} {jnp.dtype(dtype).name}",
    dict(rows=rows, columns=columns),
    lambda kernels, x, scale: f(x, scale, dtype, kernels),
    lambda seed: (normal(seed, (rows, columns)), jnp.float32(2**-4)),
    {slot: Pass((slot,), (), moved)},
  )


def rope_case(batch: int, seq: int, heads: int, head_dim: int) -> Case:
  """Reads 1, writes 1 array and reads the table."""
  moved = 4 * batch * seq * heads * head_dim + 4 * batch * seq * head_dim

  def make(seed):
    positions = jnp.broadcast_to(jnp.arange(seq), (batch, seq))
    return normal(seed, (batch, seq, heads, head_dim)), rope_table(positions, head_dim, 500_000.0)

  return Case(
    "rope",
    f"{batch * seq} x {heads} x {head_dim}",
    dict(rows=batch * seq, heads=heads, head_dim=head_dim),
    lambda kernels, x, table: rope(x, table, kernels),
    make,
    both_ways(moved, moved, wrt=(0,)),
  )


def routing_case(rows: int, experts: int, top_k: int, score: str = "softmax") -> Case:
  """Reads logits and selection, writes columns and weights; backward reads and writes logits."""
  rule = RoutingRule(top_k, score, True, 1.0)
  choices = 4 * rows * top_k

  def make(seed):
    logits = normal(seed, (8, rows // 8, experts), jnp.float32)
    bias = normal(seed + 1, (experts,), jnp.float32, std=0.1)
    return logits, logits + bias, jnp.ones(logits.shape[:2], bool)

  def f(kernels, logits, selection, valid):
    columns, weights, load = route(logits, selection, valid, rule, kernels)
    return weights, columns, load

  return Case(
    "routing",
    f"{rows} x E{experts} top-{top_k} {score}",
    dict(rows=rows, columns=experts, top_k=top_k),
    f,
    make,
    both_ways(8 * rows * experts + 2 * choices, 8 * rows * experts + 2 * choices, wrt=(0,)),
  )


def _places(seed: int, tokens: int, experts: int, top_k: int):
  scores = normal(seed + 7, (tokens, experts), jnp.float32)
  scores += 2 * normal(seed + 8, (experts,), jnp.float32)  # some experts are popular
  return jax.lax.top_k(scores, top_k)[1].astype(jnp.int32)


def sort_case(tokens: int, experts: int, top_k: int) -> Case:
  """Reads the choices, writes three arrays like them."""
  return Case(
    "sort_by_expert",
    f"{tokens} x E{experts} top-{top_k}",
    dict(rows=tokens, choices=top_k, experts=experts),
    lambda kernels, expert: sort_by_expert(expert, experts, kernels),
    lambda seed: (_places(seed, tokens, experts, top_k),),
    {"forward": Pass(("forward",), (), 16 * tokens * top_k)},
  )


def take_rows_case(tokens: int, experts: int, top_k: int, width: int) -> Case:
  """Reads each row once, writes it K times; backward the other way round."""
  moved = 2 * tokens * width * (1 + top_k) + 4 * tokens * top_k

  def make(seed):
    return normal(seed, (tokens, width)), sort_by_expert(
      _places(seed, tokens, experts, top_k), experts
    )[0]

  return Case(
    "take_rows",
    f"{tokens} x {width} top-{top_k} E{experts}",
    dict(rows=tokens, choices=top_k, width=width),
    lambda kernels, x, places: take_rows(x, places, kernels),
    make,
    both_ways(moved, moved, wrt=(0,)),
  )


def sum_rows_case(tokens: int, experts: int, top_k: int, width: int) -> Case:
  """Reads K rows a token, writes one; backward reads 1 + K and writes K."""
  row = 2 * tokens * width

  def make(seed):
    places, _ = sort_by_expert(_places(seed, tokens, experts, top_k), experts)
    weights = jax.nn.softmax(normal(seed + 2, (tokens, top_k), jnp.float32))
    return normal(seed, (tokens * top_k, width)), weights, places

  return Case(
    "sum_rows",
    f"{tokens} x {width} top-{top_k} E{experts}",
    dict(rows=tokens, choices=top_k, width=width),
    lambda kernels, y, weights, places: sum_rows(y, weights, places, kernels),
    make,
    both_ways(row * (1 + top_k), row * (1 + 2 * top_k), wrt=(0, 1)),
  )


def grouped_matmul_case(
  rows: int, experts: int, d_in: int, d_out: int, kind: str = "uneven"
) -> Case:
  """The rival is one batched matmul of equal groups: what the hardware can do."""
  flops = 2.0 * rows * d_in * d_out
  moved = 2 * (rows * (d_in + d_out) + min(rows, experts) * d_in * d_out)
  sizes = uneven(rows, experts, kind)

  def make(seed):
    w = normal(seed + 1, (experts, d_in, d_out), std=d_in**-0.5)
    return normal(seed, (rows, d_in)), w, jnp.asarray(sizes)

  def einsum(x, w, sizes):
    del sizes
    return jnp.einsum("EMD,EDF->EMF", x.reshape(experts, -1, d_in), w)

  return Case(
    "grouped_matmul",
    f"{rows} x {d_in} x {d_out} E{experts} {kind}",
    dict(rows=rows, groups=experts, d_in=d_in, d_out=d_out),
    lambda kernels, x, w, sizes: grouped_matmul(x, w, sizes, kernels),
    make,
    {"few_rows": Pass(("few_rows",), (), moved, flops)}
    if rows <= FEW_ROWS
    else {
      "forward": Pass(("forward",), (), moved, flops),
      "input_gradient": Pass(("input_gradient",), (0,), moved, flops),
      "weight_gradient": Pass(("weight_gradient",), (1,), moved, flops),
    },
    rivals={"einsum, equal groups": einsum} if rows % experts == 0 else {},
  )


def cross_entropy_case(tokens: int, width: int, vocab: int, chunk: int = 8192) -> Case:
  """One matmul for the value, three with gradients; logits should not touch memory."""
  flops = 2.0 * tokens * width * vocab

  def make(seed):
    targets = jax.random.randint(jax.random.key(seed), (1, tokens), 0, vocab)
    head = normal(seed + 1, (vocab, width), std=width**-0.5)
    return normal(seed, (1, tokens, width)), head, targets, jnp.ones((1, tokens))

  def f(kernels, x, head, targets, mask):
    x, head = reshard(x, *final_activation_axes(x)), reshard(head, *HEAD_AXES)
    return linear_cross_entropy(x, head, targets, mask, 0.0, 0.0, chunk, kernels).objective / tokens

  arrays = 2 * width * (tokens + vocab)
  return Case(
    "linear_cross_entropy",
    f"{tokens} x {width} V{vocab}",
    dict(rows=min(chunk, tokens), vocab=vocab),
    f,
    make,
    {
      "value": Pass(("value",), (), arrays, flops),
      "gradients": Pass(("gradient",), (0, 1), 2 * arrays, 3 * flops, with_forward=True),
    },
  )


def adamw_case(rows: int, width: int, moments: str = "float32") -> Case:
  """Reads parameter, gradient and moments, writes all but the gradient."""
  size, item = rows * width, jnp.dtype(moments).itemsize
  constants = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

  def make(seed):
    like = lambda i, dtype, std: normal(seed + i, (rows, width), dtype, std=std)
    nu = jnp.square(like(3, moments, 1e-3))
    return like(0, jnp.bfloat16, 0.02), like(1, jnp.bfloat16, 1e-3), like(2, moments, 1e-3), nu

  def f(kernels, param, grad, mu, nu):
    rates = UpdateScalars(0.5, 3e-4, 1 - 0.9**10, 1 - 0.95**10)
    return adamw_update(param, grad, mu, nu, rates, **constants, kernels=kernels)

  return Case(
    "adamw",
    f"{size // 2**20}M, moments {moments}" if size >= 2**20 else f"{size}, moments {moments}",
    dict(rows=size),
    f,
    make,
    {"update": Pass(("update",), (), size * (3 * 2 + 4 * item))},
    feed=lambda args, out: (out.param, args[1], out.mu, out.nu),
  )


def real_cases() -> list[Case]:
  """Two or more shapes of each op: 32k and 64k tokens, d_model 2048 and 4096, 8 to 128 experts."""
  return [
    swiglu_case(65536, 5632),
    swiglu_case(32768, 14336),
    rms_norm_case(65536, 2048),
    rms_norm_case(32768, 4096),
    rms_norm_case(32768 * 32, 128),  # of queries
    quantise_case(16384, 4096, "transposed"),
    quantise_case(16384, 14336, "transposed"),
    quantise_case(16384, 4096, "both", E5M2),
    quantise_case(16384, 14336, "both", E5M2),
    rope_case(8, 4096, 32, 128),
    rope_case(16, 4096, 8, 64),
    routing_case(65536, 8, 2),
    routing_case(65536, 64, 6),
    routing_case(32768, 128, 8, "sigmoid"),
    sort_case(32768, 8, 2),
    sort_case(32768, 64, 6),
    take_rows_case(32768, 8, 2, 2048),
    take_rows_case(32768, 64, 4, 4096),
    sum_rows_case(32768, 8, 2, 2048),
    sum_rows_case(32768, 64, 4, 4096),
    grouped_matmul_case(65536, 8, 2048, 5632),
    grouped_matmul_case(65536, 64, 2048, 1024),
    grouped_matmul_case(65536, 16, 2048, 2816, "one"),
    grouped_matmul_case(65536, 64, 2048, 1024, "empty"),
    grouped_matmul_case(65536, 128, 2048, 768),
    grouped_matmul_case(2, 8, 2048, 7168),
    grouped_matmul_case(16, 8, 7168, 2048),
    cross_entropy_case(32768, 2048, 128256),
    cross_entropy_case(32768, 4096, 128256),
    adamw_case(16384, 8192),
    adamw_case(16384, 16384, "bfloat16"),
  ]


def toy_cases() -> list[Case]:
  """The same ops in seconds on a CPU; odd shapes that fill no block, as for compute-sanitizer."""
  return [
    swiglu_case(37, 40),
    rms_norm_case(37, 72),
    rms_norm_case(9, 2056),
    quantise_case(144, 80, "transposed"),
    quantise_case(80, 208, "both", E5M2),
    rope_case(2, 32, 4, 16),
    routing_case(8 * 41, 12, 3),
    routing_case(8 * 9, 200, 8),
    sort_case(333, 12, 3),
    take_rows_case(333, 12, 3, 72),
    sum_rows_case(333, 12, 3, 72),
    grouped_matmul_case(299, 12, 64, 192, "empty"),
    grouped_matmul_case(5, 12, 64, 192, "empty"),
    cross_entropy_case(64, 32, 96, 16),
    cross_entropy_case(21, 8, 16388, 11),
    adamw_case(21, 50),
  ]
