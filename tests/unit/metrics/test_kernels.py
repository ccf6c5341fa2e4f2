import jax
import jax.numpy as jnp
import pytest

from ats_jax.metrics.kernels import Kernel, kernel_table, kernel_times


def test_a_sort_that_takes_most_of_the_time_comes_first(tmp_path):
  f = jax.jit(lambda x: jnp.tanh(jnp.sort(x, axis=0)))
  x = jax.random.normal(jax.random.key(0), (2000, 100))
  jax.block_until_ready(f(x))
  with jax.profiler.trace(str(tmp_path)):
    for _ in range(3):
      jax.block_until_ready(f(x))
  kernels = kernel_times(tmp_path)
  assert kernels[0].name.startswith("sort")
  assert kernels[0].calls % 3 == 0 and kernels[0].share > 0.5
  assert sum(k.share for k in kernels) == pytest.approx(1.0)
  assert [k.secs for k in kernels] == sorted((k.secs for k in kernels), reverse=True)


def test_the_table_sums_up_what_it_leaves_out():
  kernels = [Kernel(f"k{i}", i, 0.001 * i, i / 6) for i in (3, 2, 1)]
  lines = kernel_table(kernels, rows=1).splitlines()
  assert lines[1].split() == ["50.0%", "3.00", "3", "k3"]
  assert lines[2].split() == ["50.0%", "3.00", "3", "2", "others"]


def test_no_trace(tmp_path):
  with pytest.raises(ValueError, match=r"no profiler trace .* log\.profile_step"):
    kernel_times(tmp_path)
