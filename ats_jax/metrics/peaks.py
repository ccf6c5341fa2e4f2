"""What one device can do at most, from its maker's data sheet: the base of MFU.

Dense matmuls that accumulate in float32: half of a figure that is quoted "with sparsity". A device
whose name matches no row has no peak. Nothing is guessed from a similar name: laptop GPUs, MIG
slices and cards with other clocks or fewer cores have other peaks.
"""

import re
from typing import NamedTuple


class DevicePeak(NamedTuple):
  """The peak speed of a kind of device, a row of the table.

  Attributes:
    pattern: regular expression for jax's `device_kind`, in any case; the first row that matches
      counts.
    bfloat16: TFLOP/s of dense matmuls; 0 = the device has none in bfloat16.
    float16: TFLOP/s of dense matmuls.
    bandwidth: GB/s of its memory; 0 = unknown, as several cards have this name.
    source: the publication that states the figures.
  """

  pattern: str
  bfloat16: float
  float16: float
  bandwidth: float
  source: str


_NVIDIA = "NVIDIA data sheet: "
_GOOGLE = "cloud.google.com/tpu/docs/"
PEAKS: tuple[DevicePeak, ...] = (
  DevicePeak(r"\bMIG\b|Laptop|Max-Q", 0, 0, 0, "a part of a device, or one with other clocks"),
  DevicePeak(r"\bGB200\b", 2500, 2500, 8000, _NVIDIA + "GB200 NVL72, per GPU"),
  DevicePeak(r"\bB200\b", 2250, 2250, 8000, _NVIDIA + "HGX B200"),
  DevicePeak(r"\bGH200\b", 989, 989, 0, _NVIDIA + "GH200; 4000 or 4900 GB/s"),
  DevicePeak(r"\bH200 NVL\b", 835.5, 835.5, 4800, _NVIDIA + "H200 NVL"),
  DevicePeak(r"\bH200\b", 989, 989, 4800, _NVIDIA + "H200 SXM"),
  DevicePeak(r"\bH100 NVL\b", 835.5, 835.5, 3900, _NVIDIA + "H100 NVL"),
  DevicePeak(r"\bH100 PCIe\b", 756.5, 756.5, 2000, _NVIDIA + "H100 PCIe"),
  DevicePeak(r"\bH100\b", 989, 989, 3350, _NVIDIA + "H100 SXM"),
  DevicePeak(r"\bA100-SXM4-40GB\b", 312, 312, 1555, _NVIDIA + "A100 40GB"),
  DevicePeak(r"\bA100-SXM4-80GB\b", 312, 312, 2039, _NVIDIA + "A100 80GB SXM"),
  DevicePeak(r"\bA100 80GB PCIe\b", 312, 312, 1935, _NVIDIA + "A100 80GB PCIe"),
  DevicePeak(r"\bA100-PCIE-40GB\b", 312, 312, 1555, _NVIDIA + "A100 40GB PCIe"),
  DevicePeak(r"\bA100\b", 312, 312, 0, _NVIDIA + "A100"),
  DevicePeak(r"\bA40\b", 149.7, 149.7, 696, _NVIDIA + "A40"),
  DevicePeak(r"\bA30\b", 165, 165, 933, _NVIDIA + "A30"),
  DevicePeak(r"\bA10G\b", 70, 70, 600, _NVIDIA + "A10G"),
  DevicePeak(r"\bA10\b", 125, 125, 600, _NVIDIA + "A10"),
  DevicePeak(r"\bL40S\b", 362, 362, 864, _NVIDIA + "L40S"),
  DevicePeak(r"\bL40\b", 181, 181, 864, _NVIDIA + "L40"),
  DevicePeak(r"\bL4\b", 121, 121, 300, _NVIDIA + "L4"),
  DevicePeak(r"\bT4\b", 0, 65, 320, _NVIDIA + "T4"),
  DevicePeak(r"\bV100-SXM2\b", 0, 125, 900, _NVIDIA + "V100 SXM2"),
  DevicePeak(r"\bV100-PCIE\b", 0, 112, 900, _NVIDIA + "V100 PCIe"),
  DevicePeak(
    r"\bRTX PRO 6000 Blackwell Workstation Edition$", 503.8, 503.8, 1792,
    "NVIDIA RTX Blackwell PRO architecture paper",
  ),
  DevicePeak(r"\bRTX 6000 Ada\b", 364.2, 364.2, 960, "NVIDIA Ada PRO architecture paper"),
  DevicePeak(r"\bRTX A6000\b", 154.8, 154.8, 768, "NVIDIA GA102 architecture paper"),
  DevicePeak(r"\bRTX 5090$", 209.5, 209.5, 1792, "NVIDIA RTX Blackwell architecture paper"),
  DevicePeak(r"\bRTX 4090$", 165.2, 165.2, 1008, "NVIDIA Ada architecture paper"),
  DevicePeak(r"\bRTX 3090$", 71, 71, 936, "NVIDIA GA102 architecture paper"),
  DevicePeak(r"\bTPU v4$", 275, 0, 1228, _GOOGLE + "v4"),
  DevicePeak(r"\bTPU v5( lite|e)$", 197, 0, 819, _GOOGLE + "v5e"),
  DevicePeak(r"\bTPU v5p?$", 459, 0, 2765, _GOOGLE + "v5p"),
  DevicePeak(r"\bTPU v6( lite|e)$", 918, 0, 1638, _GOOGLE + "v6e"),
)  # fmt: skip


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
  """Returns the dense peak of one device in FLOP/s, or None where the table has no figure for it.

  Args:
    device_kind: `jax.devices()[0].device_kind`, e.g. "NVIDIA H100 80GB HBM3".
    dtype: dtype of the matmul operands, e.g. "bfloat16".
  """
  row = _row(device_kind)
  if row is None or dtype not in ("bfloat16", "float16"):
    return None
  return getattr(row, dtype) * 1e12 or None


def describe_peak(device_kind: str, dtype: str) -> str:
  """What is known of one device, in words."""
  peak, row = peak_flops(device_kind, dtype), _row(device_kind)
  if peak is None or row is None:
    return f"none is known of {device_kind!r} in {dtype}: MFU is left out"
  memory = f", memory {row.bandwidth:,.0f} GB/s" if row.bandwidth else ""
  return f"{peak / 1e12:,.1f} TFLOP/s in {dtype}{memory} ({row.source})"


def _row(device_kind: str) -> DevicePeak | None:
  matching = (row for row in PEAKS if re.search(row.pattern, device_kind, re.IGNORECASE))
  return next(matching, None)
