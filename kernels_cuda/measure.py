"""Build, check, then time every kernel against XLA on the GPU at hand; JSON lines.

  python -m kernels_cuda.measure            # all; about two minutes on an H200
  python -m kernels_cuda.measure --small    # odd little shapes, checks only (for compute-sanitizer)
  python -m kernels_cuda.measure --only=rms_norm,route
  python -m kernels_cuda.measure --only=grouped_matmul

A line with "check" says whether the values are right: relative Frobenius error against float32, of
the kernel and of XLA in the same dtype, and whether a second run gave the same bits. A line with
"time" has microseconds (median) and the share of what `stream_tbps`, measured first, would allow.
Exit status 1 if a check failed.
"""

import argparse
import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from kernels_cuda import (
  adamw,
  grouped_matmul,
  library,
  reference,
  rms_norm,
  routing,
  rows,
  swiglu,
)

EPS = 1e-5
F32, BF16 = jnp.float32, jnp.bfloat16
# name: tokens, d_model, experts, choices, width of SwiGLU, rows of SwiGLU
SHAPES = {
  "d2048 E64 K8 f1408": (32768, 2048, 64, 8, 1408, 262144),
  "d4096 E8 K2 f14336": (32768, 4096, 8, 2, 14336, 32768),
}
SMALL = {"d72 E12 K3 f40": (333, 72, 12, 3, 40, 37), "d2056 E200 K8": (70, 2056, 200, 8, 8, 3)}
ADAM_LEAVES = [(16, 2048, 8192), (16, 2048, 2048), (128256, 2048), (16, 2048), (2048,)]
SMALL_LEAVES = [(3, 50, 7), (1,), (1001,)]
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
# rows, groups, d_in, d_out, kind of sizes
MATMULS = [
  (65536, 8, 2048, 5632, "uneven"),
  (65536, 64, 2048, 1024, "uneven"),
  (65536, 16, 2048, 2816, "one has 90 %"),
  (65536, 64, 2048, 1024, "a third empty"),
  (65536, 128, 2048, 768, "uneven"),
]
SMALL_MATMULS = [(2999, 12, 136, 264, "a third empty"), (70, 5, 8, 520, "uneven")]
failures = []


def emit(**line):
  """Print one JSON line."""
  print(json.dumps(line), flush=True)


def normal(seed, *shape, dtype=BF16):
  """Random values on the device."""
  make = lambda: jax.random.normal(jax.random.key(seed), shape, dtype)
  return jax.jit(make)()


# --- checks ---------------------------------------------------------------------------------------


@jax.jit
def relative_error(got, want):
  """Of the worst leaf; NaN if anything is NaN."""

  def one(g, w):
    g, w = g.astype(F32), w.astype(F32)
    return jnp.sqrt(jnp.sum(jnp.square(g - w)) / jnp.maximum(jnp.sum(jnp.square(w)), 1e-30))

  return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, got, want))))


@jax.jit
def same_bits(a, b):
  """Whether two trees are equal bit by bit."""
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
  same = jax.tree.map(lambda x, y: jnp.array_equal(bits(x), bits(y)), a, b)
  return jnp.all(jnp.stack(jax.tree.leaves(same)))


def check(op, shape, kernel, xla, args, bound=4e-3, exact=()):
  """Compare `kernel(*args)` with `xla` on float32 copies of the floating-point arguments.

  Args:
    op: name for the line.
    shape: likewise.
    kernel: takes `args`; results are compared in order, but those in `exact` bit by bit.
    xla: the same function in XLA, for any dtype.
    args: arrays.
    bound: largest error that passes unless XLA's own is near it.
    exact: indices of results (a flat list) that must be equal.
  """
  run = jax.jit(kernel)
  got = jax.block_until_ready(run(*args))
  again = jax.block_until_ready(run(*args))
  upcast = lambda x: x.astype(F32) if x.dtype == BF16 else x
  want = jax.tree.leaves(jax.jit(xla)(*jax.tree.map(upcast, args)))
  has_bf16 = any(x.dtype == BF16 for x in jax.tree.leaves(args))
  plain = jax.tree.leaves(jax.jit(xla)(*args)) if has_bf16 else want
  leaves = jax.tree.leaves(got)
  close = [i for i in range(len(leaves)) if i not in exact]
  pick = lambda tree: [tree[i] for i in close]
  error = float(relative_error(pick(leaves), pick(want))) if close else 0.0
  xla_error = float(relative_error(pick(plain), pick(want))) if close else 0.0
  equal = all(bool(jnp.array_equal(leaves[i], want[i])) for i in exact)
  repeats = bool(same_bits(got, again))
  good = equal and repeats and error <= max(bound, 1.2 * xla_error)
  if not good:
    failures.append(f"{op} {shape}")
  emit(
    check=op, shape=shape, ok=good, error=error, xla_error=xla_error, same_bits=repeats, exact=equal
  )


# --- times ----------------------------------------------------------------------------------------


def seconds(f, sets, rounds=5, calls=3):
  """Median time of one `f(*args)`; the sets run one after the other in one program."""

  def program(sets):
    outs = []
    for args in sets:
      if outs:
        args, _ = jax.lax.optimization_barrier((args, outs[-1]))
      outs.append(f(*args))
    return outs

  run = jax.jit(program).lower(sets).compile()
  jax.block_until_ready(run(sets))
  times = []
  for _ in range(rounds):
    start = time.perf_counter()
    outs = [run(sets) for _ in range(calls)]
    jax.block_until_ready(outs)
    times.append((time.perf_counter() - start) / (calls * len(sets)))
    del outs
  return statistics.median(times)


def stream_tbps():
  """TB/s of an elementwise pass, read and written."""
  x = normal(0, 1 << 29)
  return 2 * x.nbytes / seconds(lambda x: x + 1, [(x,)]) / 1e12


def compare(op, shape, num_bytes, kernels, xla, sets, stream):
  """Time variants and XLA; one line.

  Args:
    op: name.
    shape: name.
    num_bytes: the least that must be moved.
    kernels: {variant: function}.
    xla: the baseline.
    sets: argument lists, together larger than the caches.
    stream: TB/s.
  """
  floor = num_bytes / (stream * 1e12)
  base = seconds(xla, sets)
  for variant, f in kernels.items():
    took = seconds(f, sets)
    emit(
      time=op,
      shape=shape,
      variant=variant,
      us=round(took * 1e6, 2),
      xla_us=round(base * 1e6, 2),
      speedup=round(base / took, 3),
      floor_us=round(floor * 1e6, 2),
      share_of_floor=round(floor / took, 3),
      xla_share_of_floor=round(floor / base, 3),
    )


def pullback_of(f, num_args):
  """`(args..., cotangent) -> gradients`; the forward pass is dead code unless it is needed."""
  return lambda *a: jax.vjp(f, *a[:num_args])[1](a[num_args])


# --- ops ------------------------------------------------------------------------------------------


def measure_rms_norm(name, shape, stream):
  """Without and with a residual sum."""
  tokens, width = shape[:2]
  scale = normal(9, width, dtype=F32)
  ours = lambda x, s: rms_norm.rms_norm(x, s, EPS)
  theirs = lambda x, s: reference.rms_norm(x, s, EPS)
  add_ours = lambda x, r, s: rms_norm.add_rms_norm(x, r, s, EPS)
  add_theirs = lambda x, r, s: reference.add_rms_norm(x, r, s, EPS)
  x, r, dy, dsum = (normal(i, tokens, width) for i in range(4))
  check("rms_norm forward", name, ours, theirs, (x, scale))
  grads = functools.partial(pullback_of, num_args=2)
  check("rms_norm backward", name, grads(ours), grads(theirs), (x, scale, dy))
  # The rounded sum is an input of the norm, so the judge gets it too.
  total = x + r
  rounded = lambda x, r, s: (total.astype(x.dtype), theirs(total.astype(x.dtype), s))
  check("add_rms_norm forward", name, add_ours, rounded, (x, r, scale))
  back = lambda f: lambda x, r, s, dh, dy: jax.vjp(f, x, r, s)[1]((dh, dy))

  def judge(x, r, s):
    h = x + r
    h += jax.lax.stop_gradient(total.astype(x.dtype) - h)
    return h, theirs(h, s)

  check("add_rms_norm backward", name, back(add_ours), back(judge), (x, r, scale, dsum, dy))
  if stream is None:
    return
  cells = tokens * width
  many = [(normal(10 + i, tokens, width), scale, normal(20 + i, tokens, width)) for i in range(4)]
  forward = [args[:2] for args in many]
  compare("rms_norm forward", name, 4 * cells, {"cuda": ours}, theirs, forward, stream)
  variants = {
    f"cuda {n} partials": functools.partial(
      lambda x, s, dy, n: rms_norm.rms_norm_backward(x, s, dy, eps=EPS, num_partials=n), n=n
    )
    for n in (264, 528, 792)
  }
  compare("rms_norm backward", name, 6 * cells, variants, grads(theirs), many, stream)
  added = [(a, c, s) for a, s, c in many]
  compare("add_rms_norm forward", name, 8 * cells, {"cuda": add_ours}, add_theirs, added, stream)
  both = [(a, s, c, dsum) for a, s, c in many]
  variants = {
    f"cuda {n} partials": functools.partial(
      lambda h, s, dy, dh, n: rms_norm.rms_norm_backward(h, s, dy, dh, eps=EPS, num_partials=n), n=n
    )
    for n in (264, 528)
  }

  def xla_backward(h, s, dy, dh):
    dx, dscale = jax.vjp(theirs, h, s)[1](dy)
    return dx + dh, dscale

  compare("add_rms_norm backward", name, 8 * cells, variants, xla_backward, both, stream)


def measure_swiglu(name, shape, stream):
  """SwiGLU, both ways."""
  width, num_rows = shape[4:]
  gate, up, dout = (normal(i, num_rows, width) for i in range(3))
  ours, theirs = pullback_of(swiglu.swiglu, 2), pullback_of(reference.swiglu, 2)
  check("swiglu forward", name, swiglu.swiglu, reference.swiglu, (gate, up))
  check("swiglu backward", name, ours, theirs, (gate, up, dout))
  if stream is None:
    return
  cells, sets = num_rows * width, [(gate, up, dout)]
  forward = [(gate, up)]
  compare(
    "swiglu forward", name, 6 * cells, {"cuda": swiglu.swiglu}, reference.swiglu, forward, stream
  )
  compare("swiglu backward", name, 10 * cells, {"cuda": ours}, theirs, sets, stream)


def some_logits(seed, tokens, experts):
  """Uneven loads, as a young router has them."""
  bias = jnp.linspace(1.0, -1.0, experts)
  return normal(seed, tokens, experts, dtype=F32) + bias


def measure_route(name, shape, stream):
  """Routing and sorting; tokens of padding among them."""
  tokens, _, experts, choices = shape[:4]
  bias = 0.1 * normal(1, experts, dtype=F32)
  valid = jnp.arange(tokens) % 11 > 0
  for score in ("softmax", "sigmoid"):
    settings = (choices, experts, score, True, 1.0)
    ours = lambda *a, s=settings: routing.route(*a, *s)
    theirs = lambda *a, s=settings: reference.route(*a, *s)
    args = (some_logits(0, tokens, experts), bias, valid)
    check(f"route {score}", name, ours, theirs, args, 1e-5, exact=range(1, 6))
    dweight = normal(3, tokens, choices, dtype=F32)
    grads = lambda f: lambda x, b, v, d: jax.vjp(lambda x: f(x, b, v).weight_NK, x)[1](d)
    check(f"route {score} backward", name, grads(ours), grads(theirs), (*args, dweight), 1e-5)
  expert = reference.route(*args, *settings).chosen_NK
  expert = jnp.where(valid[:, None], expert, experts)
  sort = lambda f: lambda e: f(e, experts)
  ours_sort, theirs_sort = sort(routing.sort_by_expert), sort(reference.sort_by_expert)
  check("sort_by_expert", name, ours_sort, theirs_sort, (expert,), exact=range(4))
  if stream is None:
    return
  sets = [(some_logits(10 + i, tokens, experts), bias, valid) for i in range(16)]
  num_bytes = 4 * tokens * experts + tokens + 24 * tokens * choices
  compare("route softmax", name, num_bytes, {"cuda": lambda *a: routing.route(*a, *settings)},
          lambda *a: reference.route(*a, *settings), sets, stream)  # fmt: skip
  sets = [(jnp.roll(expert, i, axis=0),) for i in range(16)]
  compare(
    "sort_by_expert", name, 16 * tokens * choices, {"cuda": ours_sort}, theirs_sort, sets, stream
  )


def measure_rows(name, shape, stream):
  """Dispatch and combine; NaN in every row and weight that must not count."""
  tokens, width, experts, choices = shape[:4]
  valid = jnp.arange(tokens) % 11 > 0
  settings = (choices, experts, "softmax", True, 1.0)
  choose = jax.jit(lambda x: reference.route(x, jnp.zeros(experts), valid, *settings))
  made = choose(some_logits(0, tokens, experts))
  places, slots = made.places, tokens * choices
  empty, nowhere = places.source_M == tokens, places.slot_NK == slots
  x, dout = normal(0, tokens, width), normal(1, tokens, width)
  y = jnp.where(empty[:, None], jnp.nan, normal(2, slots, width)).astype(BF16)
  weight = jnp.where(nowhere, jnp.nan, made.weight_NK)
  take = lambda f: lambda x, p: f(x, p)
  take_back = lambda f: lambda x, dy, p: jax.vjp(lambda x: f(x, p), x)[1](dy)
  check("take_rows", name, take(rows.take_rows), take(reference.take_rows), (x, places), exact=(0,))
  args = (x, y, places)
  check("take_rows backward", name, take_back(rows.take_rows), take_back(reference.take_rows), args)
  # The judge multiplies what has no place by zero, which a NaN does not survive.
  clean_y, clean_w = jnp.nan_to_num(y), jnp.nan_to_num(weight)
  total = lambda f: lambda y, w, p: f(y, w, p)
  clean = lambda f: lambda y, w, p: f(jnp.nan_to_num(y), jnp.nan_to_num(w), p)
  check("sum_rows", name, total(rows.sum_rows), clean(reference.sum_rows), (y, weight, places))
  back = lambda f: lambda y, w, d, p: jax.vjp(lambda y, w: f(y, w, p), y, w)[1](d)
  clean_back = lambda y, w, d, p: back(reference.sum_rows)(
    jnp.nan_to_num(y), jnp.nan_to_num(w), d, p
  )
  check("sum_rows backward", name, back(rows.sum_rows), clean_back, (y, weight, dout, places))
  if stream is None:
    return
  n, m, nk = 2 * width * tokens, 2 * width * slots, slots
  run = functools.partial(compare, shape=name, stream=stream)
  run("take_rows", num_bytes=n + m + 4 * nk, kernels={"cuda": take(rows.take_rows)},
      xla=take(reference.take_rows), sets=[(x, places), (dout, places)])  # fmt: skip
  run("take_rows backward", num_bytes=n + m + 4 * nk, kernels={"cuda": take_back(rows.take_rows)},
      xla=take_back(reference.take_rows), sets=[(x, clean_y, places)])  # fmt: skip
  run("sum_rows", num_bytes=n + m + 8 * nk, kernels={"cuda": total(rows.sum_rows)},
      xla=total(reference.sum_rows), sets=[(clean_y, clean_w, places)])  # fmt: skip
  run("sum_rows backward", num_bytes=n + 2 * m + 12 * nk, kernels={"cuda": back(rows.sum_rows)},
      xla=back(reference.sum_rows), sets=[(clean_y, clean_w, dout, places)])  # fmt: skip


def measure_adamw(leaves, stream):
  """The update with clipping, state donated."""
  for dtypes in ((F32, F32, F32, F32), (BF16, BF16, F32, F32), (BF16, BF16, BF16, BF16)):
    name = " ".join(jnp.dtype(d).name for d in dtypes)
    make = lambda seed, dtype: [normal(seed + i, *s, dtype=dtype) for i, s in enumerate(leaves)]
    p, g, m, v = (make(10 * i, d) for i, d in enumerate(dtypes))
    v = [jnp.abs(x) for x in v]
    decays = tuple(len(s) > 1 for s in leaves)

    def step(f, p, m, v, g, t, decays=decays):
      return tuple(f(p, g, m, v, steps=t, learning_rate=1e-2, decays=decays, **ADAM))

    ours, theirs = functools.partial(step, adamw.adamw), functools.partial(step, reference.adamw)
    args = (p, m, v, g, jnp.int32(7))
    check("adamw", name, ours, theirs, args, 4e-3 if BF16 in dtypes else 1e-5)
    if stream is None:
      continue
    cells = sum(x.size for x in p)
    sizes = [jnp.dtype(d).itemsize for d in dtypes]
    num_bytes = cells * (2 * sizes[0] + 2 * sizes[1] + 2 * sizes[2] + 2 * sizes[3])
    took = {}
    for variant, f in {"xla": theirs, "cuda": ours}.items():
      run = jax.jit(f, donate_argnums=(0, 1, 2))
      state = jax.tree.map(jnp.copy, (p, m, v))
      times = []
      for _ in range(6):
        start = time.perf_counter()
        for _ in range(3):
          *state, _ = run(*state, g, jnp.int32(7))
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / 3)
      took[variant] = statistics.median(times[1:])
      del state
    floor = num_bytes / (stream * 1e12)
    emit(
      time="adamw",
      shape=f"{name}, {cells / 1e6:.0f} M parameters",
      us=round(took["cuda"] * 1e6, 2),
      xla_us=round(took["xla"] * 1e6, 2),
      speedup=round(took["xla"] / took["cuda"], 3),
      floor_us=round(floor * 1e6, 2),
      share_of_floor=round(floor / took["cuda"], 3),
      xla_share_of_floor=round(floor / took["xla"], 3),
    )


def group_sizes(rows, groups, kind):
  """Sizes whose sum is a little less than `rows`, as Python integers."""
  share = np.random.default_rng(0).dirichlet(np.full(groups, 5.0))
  if kind == "one has 90 %":
    share = np.array([0.9] + [0.1 / (groups - 1)] * (groups - 1))
  if kind == "a third empty":
    share[::3] = 0
  return tuple(int(size) for size in share / share.sum() * (rows - 3))


def measure_grouped_matmul(num_rows, groups, d_in, d_out, kind, timed):
  """All three products, NaN past the last group; timed beside one cuBLAS batch of equal groups."""
  sizes = group_sizes(num_rows, groups, kind)
  sizes_E = jnp.array(sizes, jnp.int32)
  x, w = normal(0, num_rows, d_in), normal(1, groups, d_in, d_out)
  dy = normal(2, num_rows, d_out)
  past = (jnp.arange(num_rows) >= sum(sizes))[:, None]
  poison = lambda a: jnp.where(past, jnp.nan, a)
  ours, dw = grouped_matmul.grouped_matmul, grouped_matmul.grouped_matmul_dw
  # name: kernel, its arguments, the judge, the batch
  products = {
    "grouped_matmul": (ours, (x, w), reference.grouped_matmul, "EMD,EDF->EMF"),
    "grouped_matmul input gradient": (
      functools.partial(ours, transpose_w=True),
      (dy, w),
      functools.partial(reference.grouped_matmul, transpose_w=True),
      "EMF,EDF->EMD",
    ),
    "grouped_matmul_dw": (dw, (x, dy), reference.grouped_matmul_dw, "EMD,EMF->EDF"),
  }
  shape = f"{num_rows} x {d_in} x {d_out} E{groups} {kind}"
  for op, (kernel, args, judge, formula) in products.items():
    by_group = list if kernel is dw else lambda y: reference.split_rows(y, sizes)
    for block_n in grouped_matmul.BLOCK_N:
      ours_by_group = lambda a, b, f=kernel, n=block_n, g=by_group: g(f(a, b, sizes_E, block_n=n))
      name = f"{op} block_n={block_n}"
      poisoned = (poison(args[0]), poison(args[1]) if args[1] is dy else args[1])
      check(name, shape, ours_by_group, functools.partial(judge, sizes=sizes), poisoned)
    if not timed:
      continue
    cut = lambda a: a if a is w else a.reshape(groups, num_rows // groups, -1)
    batch = functools.partial(jnp.einsum, formula)
    base = seconds(batch, [tuple(cut(a) for a in args)])
    for block_n in grouped_matmul.BLOCK_N:
      run = lambda a, b, f=kernel, n=block_n: f(a, b, sizes_E, block_n=n)
      took = seconds(run, [args])
      emit(
        time=op,
        shape=shape,
        variant=f"cuda block_n={block_n}",
        us=round(took * 1e6, 2),
        tflops=round(2 * num_rows * d_in * d_out / took / 1e12, 1),
        batch_us=round(base * 1e6, 2),
        share_of_batch=round(base / took, 3),
      )


OPS = {
  "rms_norm": measure_rms_norm,
  "swiglu": measure_swiglu,
  "route": measure_route,
  "rows": measure_rows,
}


def main(argv=None) -> int:
  """Run; see the top of the file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--small", action="store_true", help="odd little shapes, checks only")
  parser.add_argument(
    "--only", default=",".join([*OPS, "adamw", "grouped_matmul"]), help="comma-separated ops"
  )
  options = parser.parse_args(argv)
  start = time.perf_counter()
  library.ensure_loaded()
  emit(
    build_s=round(time.perf_counter() - start, 1), jax=jax.__version__, device=str(jax.devices()[0])
  )
  stream = None if options.small else stream_tbps()
  emit(stream_tbps=stream)
  wanted = options.only.split(",")
  for op in wanted:
    if op == "adamw":
      measure_adamw(SMALL_LEAVES if options.small else ADAM_LEAVES, stream)
      continue
    if op == "grouped_matmul":
      for shape in SMALL_MATMULS if options.small else MATMULS:
        measure_grouped_matmul(*shape, timed=not options.small)
      continue
    for name, shape in (SMALL if options.small else SHAPES).items():
      OPS[op](name, shape, stream)
  emit(done=True, seconds=round(time.perf_counter() - start, 1), failures=failures)
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
