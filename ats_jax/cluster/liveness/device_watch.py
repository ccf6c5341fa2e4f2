"""Watches the NVIDIA GPUs of a process during its run, through NVML (the extra `nvml`)."""

import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from absl import logging

from ats_jax.cluster.liveness.devices import REASONS
from ats_jax.metrics.watcher import Watcher

EVERY_SECS = 5.0  # at least, between two readings: one takes some milliseconds
NEAR_SLOWDOWN = 2  # degrees C
RESENT = 100  # packets in one interval: a sound link resends a few
COOLING = "Look at the cooling and the power supply of its machine."
REPLACE = "Take its machine out of use and have the GPU tested."
# Xid numbers of a fault of the device; others are mostly a program's.
HARDWARE_XIDS = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120}


@dataclasses.dataclass(frozen=True)
class Reading:
  """What NVML says of one GPU; None = it does not say.

  Attributes:
    temperature: degrees C.
    slowdown_at: the temperature at which it slows down.
    reasons: why its clocks are lowered, as the bits of `REASONS`.
    memory_errors: that could not be corrected, since the driver was loaded.
    remap: whether rows of its memory wait for a reset to be replaced, and whether that failed.
    resent: packets that its links sent again, since the driver was loaded.
    recoveries: of its links.
    xids: errors that the driver has reported since the last reading.
    lost: whether the driver cannot reach it any more.
  """

  temperature: int | None = None
  slowdown_at: int | None = None
  reasons: int | None = None
  memory_errors: int | None = None
  remap: tuple[bool, bool] | None = None
  resent: int | None = None
  recoveries: int | None = None
  xids: tuple[int, ...] = ()
  lost: bool = False


def faults(now: Reading, before: Reading) -> Iterator[tuple[str, str]]:
  """What is wrong with a GPU, as (kind, sentences); `before` is its previous reading."""

  def more(name: str) -> int:
    new, old = getattr(now, name), getattr(before, name)
    return 0 if new is None or old is None else new - old

  if now.lost:
    yield "lost", f"the driver cannot reach it any more. {REPLACE}"
  heat, limit = now.temperature, now.slowdown_at
  if heat is not None and limit is not None and heat >= limit - NEAR_SLOWDOWN:
    yield "temperature", f"it is at {heat} C, and it slows down at {limit} C. {COOLING}"
  if causes := [words for bit, words in REASONS.items() if (now.reasons or 0) & bit]:
    at = "" if heat is None else f" at {heat} C"
    yield "clocks", f"its clocks are lowered{at}: {', '.join(causes)}. {COOLING}"
  if (count := more("memory_errors")) > 0:
    yield "memory", f"{count} memory errors could not be corrected. {REPLACE}"
  pending, failed = now.remap or (False, False)
  if failed:
    yield "remap", f"damaged rows of its memory could not be replaced. {REPLACE}"
  elif pending:
    yield "remap", "damaged rows of its memory are replaced at its next reset. Reset it afterwards."
  if (count := more("recoveries")) > 0:
    yield "links", f"a link was trained again {count} times. {REPLACE}"
  elif (count := more("resent")) >= RESENT:
    yield "links", f"its links sent {count} packets again. Steps may be slow. {REPLACE}"
  for xid in now.xids:
    advice = REPLACE if xid in HARDWARE_XIDS else "NVIDIA's list of Xid errors says what it means."
    yield f"xid {xid}", f"the driver reports Xid {xid}. {advice}"


class Gpu:
  """One GPU, read through NVML."""

  def __init__(self, nvml: Any, name: str, handle: Any):
    """Take a handle of `nvml`, the module `pynvml` after its nvmlInit; `name` is for people."""
    self.name, self._nvml, self._handle = name, nvml, handle
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    self._links = [link for link in links if self._ask(nvml.nvmlDeviceGetNvLinkState, link)]
    slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    self._slowdown_at = self._ask(nvml.nvmlDeviceGetTemperatureThreshold, slowdown)
    self._events, xid = None, nvml.nvmlEventTypeXidCriticalError
    if (self._ask(nvml.nvmlDeviceGetSupportedEventTypes) or 0) & xid:
      self._events = nvml.nvmlEventSetCreate()
      nvml.nvmlDeviceRegisterEvents(handle, xid, self._events)

  def read(self) -> Reading:
    """Read all that this GPU and its driver can tell."""
    nvml, ask = self._nvml, self._ask
    xids = tuple(dict.fromkeys(self._xids()))
    try:
      remapped = ask(nvml.nvmlDeviceGetRemappedRows)
      return Reading(
        temperature=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slowdown_at=self._slowdown_at,
        reasons=ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        memory_errors=ask(
          nvml.nvmlDeviceGetTotalEccErrors,
          nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
          nvml.NVML_VOLATILE_ECC,
        ),
        remap=None if remapped is None else (bool(remapped[2]), bool(remapped[3])),
        resent=self._of_links(nvml.NVML_NVLINK_ERROR_DL_REPLAY),
        recoveries=self._of_links(nvml.NVML_NVLINK_ERROR_DL_RECOVERY),
        xids=xids,
      )
    except nvml.NVMLError as error:
      if error.value != nvml.NVML_ERROR_GPU_IS_LOST:
        raise
      return Reading(xids=xids, lost=True)

  def _ask(self, function: Callable, *args: Any) -> Any:
    """Its answer; None where this GPU, driver or container does not give it."""
    nvml = self._nvml
    unknown = (
      nvml.NVML_ERROR_NOT_SUPPORTED,
      nvml.NVML_ERROR_NO_PERMISSION,
      nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
      nvml.NVML_ERROR_INVALID_ARGUMENT,  # a link or sensor that it does not have
    )
    try:
      return function(self._handle, *args)
    except nvml.NVMLError as error:
      if error.value not in unknown:
        raise
      return None

  def _of_links(self, counter: int) -> int | None:
    """A counter of errors, summed over the links."""
    counts = [
      self._ask(self._nvml.nvmlDeviceGetNvLinkErrorCounter, n, counter) for n in self._links
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None

  def _xids(self) -> Iterator[int]:
    """The errors that the driver has reported since the last call."""
    while self._events is not None:
      try:
        yield int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
      except self._nvml.NVMLError as error:
        if error.value in (self._nvml.NVML_ERROR_TIMEOUT, self._nvml.NVML_ERROR_GPU_IS_LOST):
          return
        raise


class DeviceWatch(Watcher):
  """Reads the GPUs at rows of metrics, and warns once of each kind of fault of each."""

  def __init__(self, nvml: Any, gpus: list[Gpu], every_steps: int, every_secs: float = EVERY_SECS):
    """Read `gpus` now, and then each `every_steps` steps, but not within `every_secs`."""
    self._nvml, self._gpus = nvml, gpus
    self._every_steps, self._every_secs = every_steps, every_secs
    self._said: set[tuple[str, str]] = set()
    self._before: Mapping[str, Reading] = {}
    self._next = 0.0
    self._look()

  def after(self, step: int, state: Any, metrics: Any) -> Any:
    """Read the GPUs if it is time; see `Watcher`."""
    del metrics
    if step % self._every_steps == 0 and time.monotonic() >= self._next:
      self._look()
    return state

  def _look(self) -> None:
    try:
      now = {gpu.name: gpu.read() for gpu in self._gpus}
    except self._nvml.NVMLError as error:  # of the driver: training need not end for it
      logging.warning("GPUs are not watched any more: NVML says %s.", error)
      self._gpus = []
      return
    for name, reading in now.items():
      for kind, words in faults(reading, self._before.get(name, Reading())):
        if (name, kind) not in self._said:
          self._said.add((name, kind))
          logging.warning("%s: %s", name, words)
    self._before, self._next = now, time.monotonic() + self._every_secs


def visible(ordinal: int, variable: str | None) -> int | str:
  """Which of the machine's GPUs CUDA calls `ordinal`: its number, or its UUID.

  Args:
    ordinal: of those that the process sees.
    variable: CUDA_VISIBLE_DEVICES.
  """
  if not variable:
    return ordinal
  entry = variable.split(",")[ordinal].strip()
  return int(entry) if entry.isdecimal() else entry


def open_device_watch(every_steps: int) -> Watcher:
  """Watch the NVIDIA GPUs of this process; without them or without the extra, do nothing."""
  devices = [device for device in jax.local_devices() if device.platform == "gpu"]
  if not devices or importlib.util.find_spec("pynvml") is None:
    return Watcher()
  nvml: Any = importlib.import_module("pynvml")  # an extra
  try:
    nvml.nvmlInit()
    gpus = []
    for device in devices:
      which = visible(device.local_hardware_id, os.environ.get("CUDA_VISIBLE_DEVICES"))
      by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
      handle = by_index(which) if isinstance(which, int) else by_uuid(which)
      gpus.append(Gpu(nvml, f"GPU {which}", handle))
  except nvml.NVMLError as error:
    logging.warning("GPUs are not watched: NVML says %s.", error)
    return Watcher()
  return DeviceWatch(nvml, gpus, every_steps)
