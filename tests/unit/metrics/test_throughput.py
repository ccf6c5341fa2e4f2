import pytest

from ats_jax.metrics.peaks import PEAKS, describe_peak, peak_flops
from ats_jax.metrics.throughput import Throughput


def test_bf16_peaks():
  peaks = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
  }
  # Nothing is guessed from a similar name; a V100 and a T4 have no bfloat16.
  unknown = ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"]
  unknown += ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA H20"]
  unknown += ["Tesla V100-SXM2-16GB", "Tesla T4", "TPU v3", "TPU v4 lite", "cpu", ""]
  assert {kind: peak_flops(kind) for kind in peaks} == pytest.approx(peaks)
  assert not [kind for kind in unknown if peak_flops(kind) is not None]

  assert peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12
  assert peak_flops("Tesla T4", "float16") == 65e12
  assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
  assert peak_flops("TPU v5 lite", "float16") is None


def test_a_peak_is_said_with_its_source_and_a_missing_one_too():
  said = describe_peak("NVIDIA H100 80GB HBM3", "bfloat16")
  assert said.startswith("989.0 TFLOP/s in bfloat16, memory 3,350 GB/s (NVIDIA data sheet")
  assert describe_peak("cpu", "bfloat16").endswith("'cpu' in bfloat16: MFU is left out")
  assert describe_peak("Tesla T4", "bfloat16").endswith("in bfloat16: MFU is left out")


def test_rows_of_peaks_can_be():
  for row in PEAKS[1:]:
    assert row.source and (row.bfloat16 == row.float16 or 0 in (row.bfloat16, row.float16))
    # FLOPs for each byte of memory traffic: no device has less than 50 or more than 1000.
    assert not row.bandwidth or 50 < max(row[1:3]) * 1e3 / row.bandwidth < 1000


def meter(peak):
  now = [0.0]
  flops = {"train/mfu": 2e9, "train/mfu_6n": 3e9}
  return now, Throughput(
    num_devices=2,
    peak=peak,
    rows_per_step=10,
    tokens_per_step=1000,
    flops_per_token=flops,
    clock=lambda: now[0],
  )


def test_speed_is_that_of_the_last_interval():
  now, speed = meter(peak=1e12)
  assert speed.read(1) == {}  # compiling is not an interval
  now[0] = 4.0
  assert speed.read(3) == pytest.approx(
    {
      "train/tokens_per_sec": 500.0,
      "train/samples_per_sec": 5.0,
      "train/steps_per_sec": 0.5,
      "train/tflops_per_device": 0.5,  # 2e9 a token, 500 tokens/s, 2 devices
      "train/mfu": 0.5,
      "train/mfu_6n": 0.75,
    }
  )
  now[0] = 5.0
  assert speed.read(4)["train/tokens_per_sec"] == 1000.0


def test_start_leaves_out_what_came_before():
  now, speed = meter(peak=None)
  speed.start(10)
  now[0] = 100.0  # an evaluation
  speed.start(10)
  now[0] = 101.0
  assert speed.read(10) == {}
  now[0] = 102.0
  assert speed.read(12) == {
    "train/tokens_per_sec": 2000.0,
    "train/samples_per_sec": 20.0,
    "train/steps_per_sec": 2.0,
    "train/tflops_per_device": 2.0,  # without a peak too
  }
  now[0] = 110.0  # the loop looks late, but step 14 was done at 103
  assert speed.read(14, 103.0)["train/steps_per_sec"] == 2.0
  assert speed.read(28, now=110.0)["train/steps_per_sec"] == 2.0


def test_the_summary_is_of_all_intervals():
  now, speed = meter(peak=1e12)
  assert speed.summary() == {}
  speed.start(0)
  for step, now[0] in ((10, 5.0), (20, 25.0), (30, 30.0)):
    speed.read(step)
  assert speed.summary() == pytest.approx(
    {
      "train/tokens_per_sec": 1000.0,
      "train/samples_per_sec": 10.0,
      "train/steps_per_sec": 1.0,
      "train/tflops_per_device": 1.0,
      "train/mfu": 1.0,
      "train/mfu_6n": 1.5,
      "train/step_secs_p50": 0.5,
      "train/step_secs_p90": 0.5 + 0.8 * 1.5,
      "train/step_secs_max": 2.0,
    }
  )
