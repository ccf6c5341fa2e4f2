r"""What a training step needs on a GPU or a TPU that is not there: compiled for it, and not run.

Prints the memory that the step needs beside the planner's estimate, whether it holds scores of
seq x seq (exit code 1), and what a device sends through collectives outside of loops. `lab.ahead`
says what must be installed. --out keeps the optimized program, to look for what is copied, fused or
written out; --record adds a line to a table, such as docs/lab/records/compiled.csv.
Command: python -m lab.compile_for_gpu --config=configs/dense_1_5b.py [--gpu=H200] \
  [--devices=2 --config.mesh.fsdp=2] [--out=step.txt] [--config.step.remat=names]
"""

import datetime
import sys
import time
from pathlib import Path

import jax
from absl import flags

from ats_jax import exits
from ats_jax.config import Config
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.planner.describe import describe, planned_bytes
from ats_jax.planner.memory import with_kernels
from ats_jax.step import program as programs
from ats_jax.verbs import cli
from lab.ahead import DEVICES, compiled
from lab.compiled_program import add_line, commit, scores, traffic

GIB = 2**30
FIELDS = ("device", "parameters", "attention", "experts", "rows x tokens", "compute", "GiB")
FIELDS += ("planned GiB", "scores of seq x seq", "settings", "commit", "software", "date")

_CONFIG = cli.ConfigFlag()
_GPU = flags.DEFINE_enum("gpu", "H200", list(DEVICES), "Which GPU or TPU.")
_DEVICES = flags.DEFINE_integer("devices", 1, "How many of them, on one host.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "", "Where to write the optimized program.")
_RECORD = flags.DEFINE_string("record", "", "Table (CSV) that gets a line.")


def found_scores(program: str, cfg: Config, devices: int) -> list[str]:
  """The arrays of a compiled program that may be scores of whole rows, of all rows and heads."""
  rows, seq = cfg.data.batch_size // cfg.step.accum_steps, cfg.data.seq_len
  return sorted(scores(program, seq, rows * cfg.model.num_heads * seq * seq // devices))


def main(argv: list[str]) -> int:
  """Print what was found."""
  del argv
  cfg = resolve_without_data(_CONFIG.value)
  began = time.perf_counter()
  step, made = compiled(cfg, _GPU.value, _DEVICES.value)
  secs = time.perf_counter() - began
  for choice in made.choices:
    print(choice)
  devices = f"{_DEVICES.value} x {DEVICES[_GPU.value].name}"
  needs = programs.predicted_bytes(step) / GIB
  ran = {choice.op.split(".")[0]: choice.implementation for choice in made.choices}
  named = {op: ran[op] for op in ("attention", "grouped_matmul") if op in ran}
  planned = planned_bytes(describe(with_kernels(cfg, **named), _DEVICES.value)) / GIB
  print(
    f"{made.counts.parameters / 1e9:.2f}B parameters on {devices}: the step needs {needs:.2f} GiB "
    f"(the planner estimates {planned:.2f}); compiled here in {secs:.0f} s."
  )
  program = step.as_text() or ""
  scored = ", ".join(found_scores(program, cfg, _DEVICES.value)) or "none"
  print(f"scores of {cfg.data.seq_len} x {cfg.data.seq_len}: {scored}")
  for (kind, when), sent in sorted(traffic(program).items()):
    print(f"a device sends {sent / 1e9:.2f} GB by {kind}, {when}")
  if _OUT.value:
    Path(_OUT.value).write_text(program, encoding="utf-8")
  if _RECORD.value:
    micro = cfg.data.batch_size // cfg.step.accum_steps
    settings = [a for a in sys.argv[1:] if a.startswith("--config")]
    values = (
      devices, f"{made.counts.parameters / 1e9:.2f}B", ran["attention"],
      ran.get("grouped_matmul", ""), f"{micro} x {cfg.data.seq_len}", cfg.precision.compute_dtype,
      f"{needs:.2f}", f"{planned:.2f}", scored, " ".join(settings), commit(),
      f"jax {jax.__version__}", f"{datetime.date.today()}",
    )  # fmt: skip
    add_line(Path(_RECORD.value), dict(zip(FIELDS, values, strict=True)))
  return exits.DONE if scored == "none" else exits.FAULT


if __name__ == "__main__":
  cli.run(main)
