"""How much memory the host process and the devices use, in GiB."""

from collections.abc import Sequence
from typing import Any

import jax
import psutil

GIB = 2**30
_DEVICE_STATS = {
  "bytes_in_use": "memory/device_in_use_gib",
  "peak_bytes_in_use": "memory/device_peak_gib",
  "pool_bytes": "memory/device_reserved_gib",
  "bytes_limit": "memory/device_limit_gib",
}


def memory_metrics(devices: Sequence[Any] | None = None) -> dict[str, float]:
  """Returns this process's resident memory and, where the backend reports it, device memory.

  Args:
    devices: of jax; default: the local ones. The figure is that of the fullest one.

  Returns:
    `memory/host_rss_gib` (loader processes not counted); `memory/device_in_use_gib`,
    `..._peak_gib`, `..._reserved_gib` and `..._limit_gib` if every device reports them; the CPU
    backend does not.
  """
  metrics = {"memory/host_rss_gib": psutil.Process().memory_info().rss / GIB}
  stats = [device.memory_stats() or {} for device in devices or jax.local_devices()]
  for key, name in _DEVICE_STATS.items():
    if all(key in one for one in stats):
      metrics[name] = max(one[key] for one in stats) / GIB
  return metrics
