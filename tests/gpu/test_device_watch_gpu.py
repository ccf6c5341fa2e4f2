"""The counters of a real NVIDIA GPU, read through NVML (the extra `nvml`)."""

import time

import pytest

from ats_jax.cluster.liveness.device_watch import DeviceWatch, Gpu, open_device_watch

pytestmark = pytest.mark.gpu


def test_real_counters_are_read():
  nvml = pytest.importorskip("pynvml")
  assert isinstance(open_device_watch(1), DeviceWatch)
  handle = nvml.nvmlDeviceGetHandleByIndex(0)
  gpu = Gpu(nvml, "GPU 0", handle)
  began = time.perf_counter()
  reading = gpu.read()
  secs = time.perf_counter() - began
  print(f"{nvml.nvmlDeviceGetName(handle)}: {reading} in {1e3 * secs:.1f} ms")
  assert reading.temperature is not None and 10 < reading.temperature < 100
  assert reading.reasons is not None and not reading.lost
  assert secs < 0.5
