"""What NVIDIA's driver says of this machine's GPUs that would make them slow."""

import csv
import shutil
import subprocess

FIELDS = (
  "index", "temperature.gpu", "clocks.sm", "clocks.max.sm", "clocks_event_reasons.active",
  "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
# Bits of the fifth. Others are set on a sound GPU too: idle, at its power limit, set by a user.
REASONS = {
  0x8: "hardware slowdown",
  0x20: "too hot, by software",
  0x40: "too hot, by hardware",
  0x80: "a power brake is on",
}
TIMEOUT_SECS = 20.0


def gpu_faults() -> str:
  """Say what is wrong with the GPUs of this machine; "" = nothing is, or there are none."""
  program = shutil.which("nvidia-smi")
  if program is None:
    return ""
  command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
  try:
    asked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECS)
  except subprocess.TimeoutExpired:
    return f"nvidia-smi does not answer within {TIMEOUT_SECS:.0f} s"
  return "; ".join(faults(asked.stdout)) if asked.returncode == 0 else asked.stdout.strip()


def faults(table: str) -> list[str]:
  """What is wrong, from the rows that `nvidia-smi` printed of `FIELDS`."""
  lines = []
  for row in csv.reader(table.splitlines(), skipinitialspace=True):
    if len(row) != len(FIELDS):  # "No devices were found"
      continue
    index, heat, clock, most, reasons, errors = row
    active = int(reasons, 16) if reasons.startswith("0x") else 0
    if causes := [words for bit, words in REASONS.items() if active & bit]:
      lines.append(f"GPU {index} at {heat} C runs at {clock} of {most} MHz: {', '.join(causes)}")
    if errors.isdecimal() and int(errors):
      lines.append(f"GPU {index} has had {errors} memory errors that could not be corrected")
  return lines
