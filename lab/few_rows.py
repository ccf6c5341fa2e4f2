r"""Times of the forward grouped matmul of few rows, as in generation: kernels, and Triton's tiles.

The rows are those of tokens that choose two different experts each, the weights those of `SETS`
layers in turn, so that no cache holds them. Prints a JSON line for each: microseconds, the share of
`BYTES_PER_S` with which the weights of the experts that have rows are read, and the error against
float32.
Command: python -m lab.few_rows [--rows=2,8,32] [--kernels=mosaic,triton] [--d_model=2048] \
  [--d_ff=7168]
"""

import functools
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from ats_jax.ops.grouped_matmul import grouped_matmul
from ats_jax.ops.implementations import OPS
from ats_jax.ops.registry import Kernels
from kernels_triton import plan

EXPERTS, SETS, CALLS = 8, 8, 15
BYTES_PER_S = 4.8e12  # of an H200, by its data sheet
# block_m, block_n, block_k, warps, stages
TILES = [
  (16, 16, 256, 4, 5),
  (16, 32, 128, 4, 5),
  (16, 32, 256, 4, 4),
  (16, 32, 256, 4, 5),
  (16, 32, 256, 4, 7),
  (16, 32, 256, 8, 5),
  (16, 64, 64, 4, 6),
  (16, 64, 128, 4, 4),
  (16, 64, 128, 4, 6),
  (16, 64, 256, 4, 4),
  (16, 128, 64, 4, 5),
  (16, 128, 128, 8, 4),
]

_ROWS = flags.DEFINE_list("rows", ["2", "8", "32"], "Rows of a product, two for each token.")
_KERNELS = flags.DEFINE_list("kernels", ["mosaic", "triton"], "Or xla.")
_D_MODEL = flags.DEFINE_integer("d_model", 2048, "Width of the model.", lower_bound=1)
_D_FF = flags.DEFINE_integer("d_ff", 7168, "Width of an expert.", lower_bound=1)
# More rows than these are multiplied with other tiles.
_MEASURED = range(2, plan.FEW_ROWS + 1, 2)
flags.register_validator(
  _ROWS,
  lambda rows: all(n.isdecimal() and int(n) in _MEASURED for n in rows),
  f"expected even numbers from 2 to {plan.FEW_ROWS}",
)

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def sizes_of(rows: int) -> np.ndarray:
  """Rows of each expert, int32 [EXPERTS]."""
  rng = np.random.default_rng(rows)
  chosen = [rng.choice(EXPERTS, 2, replace=False) for _ in range(rows // 2)]
  return np.bincount(np.concatenate(chosen), minlength=EXPERTS).astype(np.int32)


def normal(seed: int, *shape: int) -> jax.Array:
  """Random numbers in bfloat16."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def error_of(y: jax.Array, x: jax.Array, w: jax.Array, sizes: np.ndarray) -> float:
  """The relative error of a product, as a Frobenius norm."""
  cuts = np.split(np.asarray(x, np.float32), np.cumsum(sizes)[:-1])
  want = np.concatenate([part @ np.asarray(w[e], np.float32) for e, part in enumerate(cuts)])
  return float(np.linalg.norm(np.asarray(y, np.float32) - want) / np.linalg.norm(want))


def measure(product: Product, rows: int, weights: list[jax.Array]) -> dict[str, float]:
  """Time a product of rows with each of the weights in turn."""
  sizes = sizes_of(rows)
  xs = [normal(100 + turn, rows, weights[0].shape[1]) for turn in range(3)]
  run = jax.jit(lambda xs, ws, sizes: [product(x, w, sizes) for x in xs for w in ws])
  ys = jax.block_until_ready(run(xs, weights, sizes))
  error, times = error_of(ys[0], xs[0], weights[0], sizes), []
  for _ in range(7):
    began = time.perf_counter()
    for _ in range(CALLS):
      ys = run(xs, weights, sizes)
    jax.block_until_ready(ys)
    times.append((time.perf_counter() - began) / CALLS / len(ys))
  secs = statistics.median(times)
  moved = int((sizes > 0).sum()) * weights[0][0].nbytes
  share = moved / secs / BYTES_PER_S
  return {"us": round(1e6 * secs, 2), "share": round(share, 3), "error": float(f"{error:.2g}")}


def main(argv: list[str]) -> None:
  """Print a line for each number of rows, matrix, kernel and tile."""
  del argv
  for d_in, d_out in ((_D_MODEL.value, _D_FF.value), (_D_FF.value, _D_MODEL.value)):
    scale = jnp.bfloat16(d_in**-0.5)  # for products of about 1
    weights = [scale * normal(seed, EXPERTS, d_in, d_out) for seed in range(SETS)]
    for rows in map(int, _ROWS.value):
      for name in _KERNELS.value:
        kernels = Kernels(tuple((f"grouped_matmul.{s}", name) for s in OPS["grouped_matmul"].slots))
        product = functools.partial(grouped_matmul, kernels=kernels)
        for tile in TILES if name == "triton" else [None]:
          if tile is not None:
            blocks = dict(zip(("block_m", "block_n", "block_k"), tile, strict=False))
            plan.GROUPED_FEW = plan.GROUPED_NARROW = (plan.Tile(blocks, *tile[3:]),)
          about = {"kernel": name, "rows": rows, "d_in": d_in, "d_out": d_out, "tile": tile}
          print(json.dumps(about | measure(product, rows, weights)), flush=True)


if __name__ == "__main__":
  app.run(main)
