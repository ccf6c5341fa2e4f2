import pytest

from ats_jax.metrics.peaks import peak_flops
from ats_jax.metrics.throughput import Throughput, mfu


@pytest.mark.parametrize(
  ("kind", "bf16"),
  [
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756.5e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA B200", 2250e12),
    ("NVIDIA A100-SXM4-40GB", 312e12),
    ("NVIDIA A100 80GB PCIe", 312e12),
    ("NVIDIA L4", 121e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA GeForce RTX 4090", 165e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v5p", 459e12),
    ("TPU v6 lite", 918e12),
    # Nothing is guessed from a similar name.
    ("NVIDIA L40", None),
    ("NVIDIA H100 NVL", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", None),
    ("NVIDIA GB200", None),
    ("NVIDIA H20", None),
    ("Tesla V100-SXM2-16GB", None),  # no bfloat16
    ("Tesla T4", None),
    ("TPU v3", None),
    ("TPU v4 lite", None),
    ("cpu", None),
    ("", None),
  ],
)
def test_bf16_peaks(kind, bf16):
  assert peak_flops(kind) == bf16


def test_peaks_depend_on_the_dtype():
  assert peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12
  assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
  assert peak_flops("TPU v5 lite", "float16") is None


def test_mfu_of_a_known_run():
  # 8 devices at 50 % of 1e15 FLOP/s, 4e10 FLOPs a token.
  assert mfu(4e10, 1e5, 8, 1e15) == pytest.approx(0.5)
  assert mfu(4e10, 1e5, 8, None) is None


def meter(peak):
  now = [0.0]
  flops = {"train/mfu": 2e9, "train/mfu_6n": 3e9}
  return now, Throughput(
    num_devices=2,
    peak=peak,
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
      "train/steps_per_sec": 0.5,
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
  assert speed.read(12) == {"train/tokens_per_sec": 2000.0, "train/steps_per_sec": 2.0}


def test_the_time_of_an_event_in_the_past_counts():
  now, speed = meter(peak=None)
  speed.start(10)
  now[0] = 9.0  # the loop looks late, but step 14 was done at 2.0
  assert speed.read(14, 2.0)["train/steps_per_sec"] == 2.0
  assert speed.read(28, now=9.0)["train/steps_per_sec"] == 2.0


def test_the_summary_is_of_all_intervals():
  now, speed = meter(peak=1e12)
  assert speed.summary() == {}
  speed.start(0)
  for step, now[0] in ((10, 5.0), (20, 25.0), (30, 30.0)):
    speed.read(step)
  assert speed.summary() == pytest.approx(
    {
      "train/tokens_per_sec": 1000.0,
      "train/steps_per_sec": 1.0,
      "train/mfu": 1.0,
      "train/mfu_6n": 1.5,
      "train/step_secs_p50": 0.5,
      "train/step_secs_p90": 0.5 + 0.8 * 1.5,
      "train/step_secs_max": 2.0,
    }
  )
