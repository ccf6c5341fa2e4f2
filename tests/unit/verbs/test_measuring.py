"""How bench and tune measure: which cases, and loops that feed results back. No times."""

import jax
import jax.numpy as jnp
import numpy as np

from ats_jax.ops import registry
from ats_jax.verbs import tune
from ats_jax.verbs.bench.cases import real_cases
from ats_jax.verbs.bench.measure import device_secs, loop


def test_each_shape_class_is_tuned_once_in_every_slot():
  cases = real_cases()
  chosen = [
    c for op in {c.op for c in cases} for _, c in tune.one_of_each([o for o in cases if o.op == op])
  ]
  of = lambda case: {
    (case.op, registry.shape_class(**case.dims), slot)
    for of_pass in case.passes.values()
    for slot in of_pass.slots
  }
  assert set().union(*map(of, chosen)) == set().union(*map(of, cases))
  assert sum(len(of(case)) for case in chosen) == len(set().union(*map(of, cases)))


def test_one_tile_parameter_after_the_other():
  ms = {(1, 4): 10.0, (2, 4): 9.0, (3, 4): float("inf"), (2, 8): 8.9, (2, 16): 7.0}
  found = tune.search({"a": (1, 2, 3), "b": (4, 8, 16)}, lambda t: ms[t["a"], t["b"]])
  assert found == ({"a": 2, "b": 16}, 7.0)
  assert tune.search({"b": (4, 8)}, lambda t: ms[2, t["b"]]) == ({"b": 4}, 9.0)  # less is noise


def test_what_is_found_is_kept_beside_what_was(tmp_path, monkeypatch):
  monkeypatch.setattr(registry, "TUNING", tmp_path)
  entry = {"implementation": "cuda", "tiles": {"block": 2}, "ms": 1.23456, "xla_ms": 2.0}
  tune.write("NVIDIA Test", "swiglu", "rows<=8", {"forward": entry})
  tune.write("NVIDIA Test", "swiglu", "rows<=16", {"forward": entry | {"ms": 3.0}})
  registry.tuning_table.cache_clear()
  found = registry.tuning_table("NVIDIA Test", "swiglu")["forward"]
  registry.tuning_table.cache_clear()
  assert {shape: e["ms"] for shape, e in found.items()} == {"rows<=8": 1.2346, "rows<=16": 3.0}
  assert found["rows<=8"]["jax"] == jax.__version__


def test_a_loop_feeds_results_back_or_does_the_same_again():
  x = jnp.zeros(3)
  f = lambda x: (x + 1,)
  args, _ = loop(f, 4, lambda args, out: out)((x,), f(x))
  np.testing.assert_array_equal(args[0], 4)
  args, out = loop(f, 4)((x,), f(x))
  assert args is None
  np.testing.assert_array_equal(out[0], 1)


def test_both_loops_can_be_timed():
  f = lambda x: (x @ x,)
  for feed in (None, lambda args, out: out):
    assert np.isfinite(device_secs(f, (jnp.eye(64),), feed=feed))
