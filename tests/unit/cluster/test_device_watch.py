"""What a run says of its GPUs, from counters as NVML gives them."""

import collections
import dataclasses
import types

import pytest
from absl import logging as absl_logging

from ats_jax.cluster.liveness.device_watch import (
  DeviceWatch,
  Gpu,
  Reading,
  faults,
  open_device_watch,
  visible,
)
from ats_jax.metrics.watcher import Watcher

SOUND = Reading(
  temperature=55, slowdown_at=87, reasons=0x4, memory_errors=2, remap=(False, False), resent=7,
  recoveries=1,
)  # fmt: skip


@pytest.mark.parametrize(
  ("change", "kinds", "said"),
  [
    ({}, [], ""),
    ({"temperature": 84}, [], ""),
    ({"temperature": 85}, ["temperature"], "at 85 C, and it slows down at 87 C"),
    ({"temperature": 99, "slowdown_at": None}, [], ""),
    ({"reasons": 0x1 | 0x2 | 0x10}, [], ""),
    ({"reasons": 0x4 | 0x40}, ["clocks"], "lowered at 55 C: too hot, by hardware."),
    ({"memory_errors": 5}, ["memory"], "3 memory errors could not be corrected"),
    ({"memory_errors": 0}, [], ""),  # the driver was loaded again
    ({"memory_errors": None}, [], ""),
    ({"remap": (True, False)}, ["remap"], "replaced at its next reset"),
    ({"remap": (True, True)}, ["remap"], "could not be replaced"),
    ({"resent": 106}, [], ""),
    ({"resent": 107}, ["links"], "sent 100 packets again"),
    ({"recoveries": 2, "resent": 999}, ["links"], "trained again 1 times"),
    ({"xids": (79, 13)}, ["xid 79", "xid 13"], "Xid 79. Take its machine out of use"),
    ({"xids": (31,)}, ["xid 31"], "list of Xid errors"),
    ({"lost": True}, ["lost"], "cannot reach it"),
  ],
)
def test_faults_of_a_reading(change, kinds, said):
  found = dict(faults(dataclasses.replace(SOUND, **change), SOUND))
  assert list(found) == kinds and said in " ".join(found.values())


class NVMLError(Exception):
  def __init__(self, value):
    super().__init__(f"error {value}")
    self.value = value


class Nvml:
  """The module's boundary: answers of one GPU, by function and arguments; others are unknown."""

  NVMLError = NVMLError
  NVML_NVLINK_MAX_LINKS = 3
  NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = NVML_NVLINK_ERROR_DL_REPLAY = 0
  NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
  NVML_NVLINK_ERROR_DL_RECOVERY = 1
  NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 2, 3, 4
  NVML_ERROR_TIMEOUT, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 10, 13, 15
  nvmlEventTypeXidCriticalError = 8

  def __init__(self):
    self.xids = collections.deque()
    self.answers = {
      ("GetNvLinkState", 0): 1,
      ("GetNvLinkState", 1): 0,
      ("GetNvLinkState", 2): 1,
      ("GetTemperatureThreshold", 1): 87,
      ("GetSupportedEventTypes",): 31,
      ("GetTemperature", 0): 55,
      ("GetCurrentClocksThrottleReasons",): 0,
      ("GetTotalEccErrors", 1, 0): 0,
      ("GetRemappedRows",): (0, 0, 0, 0),
      ("GetNvLinkErrorCounter", 0, 0): 3,
      ("GetNvLinkErrorCounter", 2, 0): 4,
    }

  def __getattr__(self, name):
    def ask(handle, *args):
      assert handle == "handle"
      answer = self.answers.get((name.removeprefix("nvmlDevice"), *args), NVMLError(3))
      if isinstance(answer, NVMLError):
        raise answer
      return answer

    if not name.startswith("nvmlDeviceGet"):
      raise AttributeError(name)
    return ask

  def nvmlEventSetCreate(self):  # noqa: N802
    return "events"

  def nvmlDeviceRegisterEvents(self, handle, types, events):  # noqa: N802
    assert (handle, types, events) == ("handle", 8, "events")

  def nvmlEventSetWait_v2(self, events, timeout):  # noqa: N802
    assert (events, timeout) == ("events", 0)
    if not self.xids:
      raise NVMLError(10)
    return types.SimpleNamespace(eventData=self.xids.popleft())


def test_a_gpu_is_read_as_far_as_it_can_tell():
  nvml = Nvml()
  nvml.xids.extend([31, 31, 79])
  gpu = Gpu(nvml, "GPU 0", "handle")
  want = Reading(55, 87, 0, 0, (False, False), resent=7, recoveries=None, xids=(31, 79))
  assert gpu.read() == want
  nvml.answers = {}
  assert gpu.read() == Reading(slowdown_at=87)  # and no Xid twice
  assert Gpu(nvml, "GPU 0", "handle").read() == Reading()
  nvml.answers["GetTemperature", 0] = NVMLError(15)
  assert gpu.read() == Reading(lost=True)


def test_each_kind_of_fault_is_said_once(monkeypatch):
  said, nvml = [], Nvml()
  monkeypatch.setattr(absl_logging, "warning", lambda text, *args: said.append(text % args))
  watch = DeviceWatch(nvml, [Gpu(nvml, "GPU 0", "handle")], every_steps=2, every_secs=0)
  nvml.answers["GetTotalEccErrors", 1, 0] = 1
  assert watch.after(1, "state", None) == "state" and not said  # no row of metrics
  watch.after(2, None, None)
  assert len(said) == 1 and said[0].startswith("GPU 0: 1 memory errors")
  nvml.answers["GetTotalEccErrors", 1, 0] = 2
  nvml.xids.append(79)
  watch.after(4, None, None)
  assert len(said) == 2 and said[1].startswith("GPU 0: the driver reports Xid 79")
  nvml.answers["GetTemperature", 0] = NVMLError(999)
  watch.after(6, None, None)
  watch.after(8, None, None)
  assert said[2:] == ["GPUs are not watched any more: NVML says error 999."]


def test_readings_keep_their_distance():
  nvml = Nvml()
  watch = DeviceWatch(nvml, [Gpu(nvml, "GPU 0", "handle")], every_steps=1, every_secs=3600)
  nvml.xids.append(79)
  watch.after(1, None, None)
  assert list(nvml.xids) == [79]


def test_nothing_is_watched_without_a_gpu():
  assert type(open_device_watch(1)) is Watcher


@pytest.mark.parametrize(
  ("ordinal", "variable", "want"),
  [(1, None, 1), (1, "", 1), (0, "3,1", 3), (1, "3, 1", 1), (0, "GPU-8932f937", "GPU-8932f937")],
)
def test_visible_devices(ordinal, variable, want):
  assert visible(ordinal, variable) == want
