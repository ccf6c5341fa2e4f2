r"""Planned memory beside what was measured on one and two H200s and H100s.

Needs no GPU. The measured bytes are those of docs/lab/records; where there are none of
today's program, what it was compiled to by lab/compile_for_gpu.py.
Command: python -m lab.planned_memory
"""

from typing import NamedTuple

from absl import app

from ats_jax.metrics.memory import GIB
from ats_jax.planner.describe import describe, planned_bytes
from lab.planned_times import (
  COPIED,
  CUT,
  DENSE,
  EIGHT,
  EIGHT_BIT,
  EXPERT,
  FEWER,
  FSDP,
  HOSTS,
  INPUTS,
  KEPT,
  LONG,
  LONGEST,
  LOOP,
  MANY,
  NAMES,
  ONCE,
  ROUNDS,
  SENT,
  SHORT,
  SIXTEEN,
  SMALL,
  STAGE,
  SUMS,
  TWENTY,
  resolved,
)

LORA = f"{DENSE} finetune.adapter=lora"
LESS, TENSOR = f"{EXPERT} {FEWER}", "mesh.tensor=2"
TWELVE = f"{EIGHT} model.num_layers=12 precision.param_dtype=float32"
COPIES, BY_COPIES = "mesh.keep_gathered=true mesh.copy_engines=true", "mesh.copy_engines=true"


class Measured(NamedTuple):
  """A step: on how many of which GPUs, of what, with which settings; and GiB of a device.

  Attributes:
    gpu: H100 or H200.
    devices: how many.
    name: of the row.
    settings: of the run, as words SETTING=VALUE.
    rows: of a step.
    gib: the measured peak.
    config: the file of the run.
    is_compiled: whether it was compiled for such GPUs and not measured.
  """

  gpu: str
  devices: int
  name: str
  settings: str
  rows: int
  gib: float
  config: str = "dense_1_5b"
  is_compiled: bool = False


STEPS = (
  Measured("H200", 1, "1.5B, float32 weights", "", 8, 56.1),
  Measured("H200", 1, "1.5B", SHORT, 8, 44.9),
  Measured("H200", 2, "1.5B, fsdp", f"{SHORT} {FSDP}", 16, 34.9, is_compiled=True),
  Measured("H200", 2, "1.5B, fsdp, kept", f"{SHORT} {KEPT}", 16, 36.4),
  Measured("H200", 2, "1.5B, copied", f"{SHORT} {COPIED}", 16, 36.9),
  Measured("H200", 1, "8.03B", DENSE, 4, 102.8),
  Measured("H200", 2, "8.03B, fsdp", f"{DENSE} {FSDP}", 8, 74.9, is_compiled=True),
  Measured("H200", 2, "8.03B, fsdp, kept", f"{DENSE} {KEPT}", 8, 87.9),
  Measured("H200", 2, "8.03B, copied", f"{DENSE} {COPIED}", 8, 92.0),
  Measured("H200", 1, "8.03B, LoRA, remat=dots", f"{LORA} step.remat=dots", 2, 64.5),
  Measured("H200", 1, "the same, remat=names", f"{LORA} step.remat=names", 2, 43.5),
  Measured("H200", 1, "the same, remat=full", f"{LORA} step.remat=full", 4, 27.3),
  Measured("H200", 1, "8 experts", EIGHT, 4, 89.1),
  Measured("H200", 2, "8 experts, fsdp", f"{EIGHT} {FSDP}", 8, 59.7, is_compiled=True),
  Measured("H200", 2, "8 experts, fsdp, kept", f"{EIGHT} {KEPT}", 8, 77.1),
  Measured("H200", 2, "8 experts, copied", f"{EIGHT} {COPIED}", 8, 76.1),
  Measured("H200", 2, "8 experts, expert", f"{EIGHT} {EXPERT}", 8, 72.0),
  Measured("H200", 2, "the same, less room", f"{EIGHT} {LESS}", 8, 65.8),
  Measured("H200", 2, "the same, copied", f"{EIGHT} {LESS} {COPIES}", 8, 74.4),
  Measured("H200", 1, "8 experts, 12 layers, float32 weights", TWELVE, 4, 68.1, is_compiled=True),
  Measured("H200", 1, "64 experts", MANY, 4, 78.4),
  Measured("H200", 1, "8.03B, a row of 32,768", LONG, 1, 72.5),
  Measured("H200", 2, "two rows, tensor", f"{LONG} {TENSOR}", 2, 53.3, is_compiled=True),
  Measured("H200", 2, "8.03B, stage, in a loop", f"{DENSE} {STAGE} {LOOP}", 16, 62.4),
  Measured("H200", 2, "the same, unrolled", f"{DENSE} {STAGE}", 16, 58.1),
  Measured("H200", 2, "the same, two rounds", f"{DENSE} {ROUNDS}", 16, 54.8),
  Measured("H200", 2, "1.5B, stage, in a loop", f"{SHORT} {STAGE} {LOOP}", 16, 14.6),
  Measured("H200", 2, "the same, unrolled", f"{SHORT} {STAGE}", 16, 14.5),
  Measured("H200", 2, "the same, two rounds", f"{SHORT} {ROUNDS}", 16, 12.7),
  Measured("H200", 2, "the same, names kept", f"{SHORT} {ROUNDS} {NAMES}", 16, 34.7),
  Measured("H200", 1, "1.5B, two sums, in a loop", f"{SHORT} {SUMS} {LOOP}", 16, 48.0),
  Measured("H200", 1, "the same, unrolled", f"{SHORT} {SUMS}", 16, 53.6),
  Measured("H200", 1, "16 layers, two sums, in a loop", f"{SIXTEEN} {SUMS} {LOOP}", 8, 93.5),
  Measured("H200", 1, "the same, unrolled", f"{SIXTEEN} {SUMS}", 8, 102.6),
  Measured("H200", 2, "1.5B, two sums, fsdp, in a loop", f"{SHORT} {SUMS} {FSDP} {LOOP}", 32, 38.1),
  Measured("H200", 2, "the same, unrolled", f"{SHORT} {SUMS} {FSDP}", 32, 38.0),
  Measured("H200", 2, "two rows, context, remat=attention", f"{LONG} {ONCE}", 2, 52.0),
  Measured("H200", 2, "the same, copied", f"{LONG} {ONCE} {BY_COPIES}", 2, 51.8),
  Measured("H200", 2, "two rows, context, remat=qkv", f"{LONG} {INPUTS}", 2, 70.1),
  Measured("H200", 2, "the same, copied", f"{LONG} {INPUTS} {BY_COPIES}", 2, 67.0),
  Measured("H200", 2, "131,072, remat=attention", f"{LONGEST} {ONCE}", 1, 78.4),
  Measured("H200", 2, "the same, copied", f"{LONGEST} {ONCE} {BY_COPIES}", 1, 71.2),
  Measured("H200", 2, "131,072, remat=qkv", f"{LONGEST} {INPUTS}", 1, 115.2),
  Measured("H200", 2, "the same, copied", f"{LONGEST} {INPUTS} {BY_COPIES}", 1, 109.2),
  Measured("H100", 2, "1.5B, float32 weights, fsdp", FSDP, 16, 38.3, is_compiled=True),
  Measured("H100", 2, "1.5B, float32 weights, tensor", TENSOR, 16, 43.9, is_compiled=True),
  Measured("H100", 1, "360M", "step.accum_steps=1", 16, 9.3, "gpt_350m", is_compiled=True),
  Measured("H100", 1, "8 experts, 8 layers", SMALL, 8, 50.6, is_compiled=True),
  Measured("H100", 2, "8 experts, 8 layers, fsdp", f"{SMALL} {FSDP}", 16, 31.0, is_compiled=True),
  Measured("H100", 1, "1.5B", SHORT, 8, 44.1),
  Measured("H100", 2, "1.5B, fsdp, kept", f"{SHORT} {KEPT}", 16, 36.5),
  Measured("H100", 2, "1.5B, copied", f"{SHORT} {COPIED}", 16, 36.9),
  Measured("H100", 2, "1.5B, replicas", SHORT, 16, 38.6),
  Measured("H100", 2, "the same, in 8 bits", f"{SHORT} {SENT}", 16, 41.2),
  Measured("H100", 1, "1.5B in 8 bits", EIGHT_BIT, 8, 40.7),
  Measured("H100", 2, "the same, fsdp, kept", f"{EIGHT_BIT} {KEPT}", 16, 35.5),
  Measured("H100", 1, "5.41B", TWENTY, 4, 70.0),
  Measured("H100", 2, "5.41B, fsdp, kept", f"{TWENTY} {KEPT}", 8, 58.7),
  Measured("H100", 2, "5.41B, copied", f"{TWENTY} {COPIED}", 8, 60.7),
  Measured("H100", 1, "8 experts, 16 layers", SIXTEEN, 4, 62.9),
  Measured("H100", 2, "16 layers, fsdp", f"{SIXTEEN} {FSDP}", 8, 41.8),
  Measured("H100", 2, "16 layers, fsdp, kept", f"{SIXTEEN} {KEPT}", 8, 53.2),
  Measured("H100", 2, "16 layers, copied", f"{SIXTEEN} {COPIED}", 8, 53.2),
  Measured("H100", 2, "16 layers, expert", f"{SIXTEEN} {EXPERT}", 8, 50.1),
  Measured("H100", 2, "the same, less room", f"{SIXTEEN} {LESS}", 8, 46.0),
  Measured("H100", 2, "the same, copied", f"{SIXTEEN} {LESS} {COPIES}", 8, 51.4),
  Measured("H100", 2, "16 layers, expert, two hosts", f"{SIXTEEN} {EXPERT} {HOSTS}", 8, 50.2),
  Measured("H100", 2, "two rows of 32,768, context", f"{LONG} {CUT}", 2, 48.5),
  Measured("H100", 2, "the same, remat=attention", f"{LONG} {ONCE}", 2, 52.5),
  Measured("H100", 2, "two rows, tensor", f"{LONG} {TENSOR}", 2, 53.2),
  Measured("H100", 2, "a row of 131,072, context", f"{LONGEST} {CUT}", 1, 59.9),
  Measured("H100", 2, "the same, remat=attention", f"{LONGEST} {ONCE}", 1, 72.3),
  Measured("H100", 2, "8.03B, stage, in a loop", f"{DENSE} {STAGE} {LOOP}", 16, 62.5),
  Measured("H100", 2, "the same, two rounds", f"{DENSE} {ROUNDS} {LOOP}", 16, 59.6),
  Measured("H100", 2, "1.5B, stage, in a loop", f"{SHORT} {STAGE} {LOOP}", 16, 14.6),
  Measured("H100", 2, "the same, two rounds", f"{SHORT} {ROUNDS} {LOOP}", 16, 13.7),
  Measured("H100", 2, "the same, names kept", f"{SHORT} {ROUNDS} {NAMES} {LOOP}", 16, 37.0),
)


def planned(step: Measured) -> float:
  """GiB of a device by the planner."""
  settings = f"{step.settings} data.batch_size={step.rows}"
  return planned_bytes(describe(resolved(step.config, settings), step.devices)) / GIB


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  print("| GiB of a device | planned | measured | planned over it |\n|---|--:|--:|--:|")
  for step in STEPS:
    found = planned(step)
    devices = f"two {step.gpu}s" if step.devices == 2 else step.gpu
    name = f"{step.name} (compiled)" if step.is_compiled else step.name
    gap = f"{100 * (found / step.gib - 1):+.0f} %"
    print(f"| {devices}: {name} | {found:.1f} | {step.gib:.1f} | {gap} |")


if __name__ == "__main__":
  app.run(main)
