import mmap

import jax
import numpy as np
import pytest

from ats_jax.metrics.memory import memory_metrics


def test_resident_memory_of_this_process_grows_with_it():
  before = memory_metrics()
  # From the system, not from memory that the process has kept; touched, so that it is resident.
  block = mmap.mmap(-1, 2**27)
  np.frombuffer(block, np.uint8)[:] = 1
  after = memory_metrics()
  assert after["memory/host_rss_gib"] - before["memory/host_rss_gib"] == pytest.approx(
    0.125, abs=0.05
  )
  if jax.default_backend() == "cpu":
    assert set(before) == {"memory/host_rss_gib"}


class Device:
  def __init__(self, **stats):
    self._stats = stats

  def memory_stats(self):
    return self._stats


def test_the_fullest_device_counts_in_gib():
  gib = 2**30
  devices = [
    Device(bytes_in_use=2 * gib, peak_bytes_in_use=9 * gib, pool_bytes=0, bytes_limit=80 * gib),
    Device(bytes_in_use=3 * gib, peak_bytes_in_use=8 * gib, pool_bytes=10 * gib),
  ]
  metrics = memory_metrics(devices)
  assert metrics.pop("memory/host_rss_gib") > 0
  # One device reports no limit: none is claimed.
  assert metrics == {
    "memory/device_in_use_gib": 3.0,
    "memory/device_peak_gib": 9.0,
    "memory/device_reserved_gib": 10.0,
  }
