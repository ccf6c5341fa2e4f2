"""Batches on the mesh: the arrays that the loop would put there itself, made by another thread."""

import threading
from concurrent import futures

import jax
import numpy as np
import pytest
from helpers import tiny_config

from ats_jax.data.sources import open_data
from ats_jax.sharding.mesh import batch_sharding, make_mesh, to_global
from ats_jax.sharding.rules import spec, under_this_plan, use_plan
from ats_jax.train import feed


@pytest.mark.parametrize("workers", (0, 1))
def test_batches_on_the_mesh_are_those_of_the_host(workers, tmp_path, monkeypatch):
  threads = set()

  def placing(batch, mesh):
    threads.add(threading.current_thread())
    return to_global(batch, mesh)

  monkeypatch.setattr(feed, "to_global", placing)
  (tmp_path / "text.txt").write_text("one two three four\n" * 200)
  cfg = tiny_config({
    "model.vocab_size": 384, "data.paths": (str(tmp_path / "text.txt"),),
    "data.cache_dir": str(tmp_path / "cache"), "data.num_workers": workers,
  })  # fmt: skip
  mesh = make_mesh(cfg)
  with jax.set_mesh(mesh):
    train_set, _ = open_data(cfg.data, cfg.seed)
    with (
      feed.train_feed(cfg, train_set) as on_host,
      feed.train_feed(cfg, train_set, on_mesh=True) as on_mesh,
    ):
      for _ in range(3):
        expected, found = next(on_host), next(on_mesh)
        assert found.keys() == expected.keys()
        for name, x in found.items():
          assert x.sharding == batch_sharding(mesh, 3)
          np.testing.assert_array_equal(x, expected[name])
      assert on_mesh.position() == on_host.position()  # what was made ahead does not count
  # A worker's batch is placed where it arrives.
  assert (threading.main_thread() in threads) == (workers > 0)


def test_a_function_for_another_thread_keeps_the_plan():
  with use_plan("data_parallel"):
    bound = under_this_plan(spec)
    expected = spec("embed")
  with futures.ThreadPoolExecutor(1) as thread:
    assert thread.submit(spec, "embed").result() != expected
    assert thread.submit(bound, "embed").result() == expected
