"""Seconds, those of the processor too, and size of the report of a run with very many rows.

python -m lab.report_speed [--rows=200000] [--layer_rows=2000]
"""

import json
import math
import tempfile
import time
from pathlib import Path

from absl import flags

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.names import to_dict
from ats_jax.report.page import html_page
from ats_jax.report.read import read_run
from ats_jax.report.report import make_report
from ats_jax.verbs import cli

_ROWS = flags.DEFINE_integer("rows", 200_000, "Rows of metrics.jsonl.", lower_bound=1)
_LAYER_ROWS = flags.DEFINE_integer("layer_rows", 2000, "Rows of layers.jsonl.", lower_bound=0)
LAYERS, EXPERTS = 32, 64
# As a dense run under an orchestrator writes them.
NAMES = (
  "train/accuracy", "train/z", "reflex/z_loss", "reflex/z_grad", "reflex/grad_scale",
  "reflex/shrunk_tensor", "reflex/rate_scale", "reflex/skipped", "reflex/broken", "reflex/held",
  "reflex/wrong", "reflex/wrong_tensor", "reflex/miscounted", "train/grad_norm",
  "train/update_norm", "train/learning_rate", "train/param_norm", "train/scheduled_rate",
  "train/tokens", "reflex/step", "train/perplexity", "progress/share", "train/clipped",
  "train/tokens_per_sec", "train/samples_per_sec", "train/steps_per_sec",
  "train/tflops_per_device", "train/mfu", "train/mfu_6n", "memory/host_rss_gib",
  "memory/device_in_use_gib", "memory/device_peak_gib",
)  # fmt: skip


def write_run(folder: Path, rows: int, layer_rows: int) -> None:
  """Write the folder of a run as the report reads it, with a spike at every 10,000th row."""
  settings = {"format": 3, **to_dict(from_config_dict(base_config())), "num_steps": rows}
  (folder / "config.json").write_text(json.dumps(settings))
  with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, rows + 1):
      wave = math.sin(step) / 50
      row = {"step": step, "wall_time": 1e9 + step / 3, "train/loss": 9 / step**0.1 + wave}
      row |= {name: (1.0 + wave) / (number + 3) for number, name in enumerate(NAMES)}
      if step % 10_000 == 0:
        row["train/loss"] = 50.0 + step / rows
      row |= {"progress/tokens": 1024.0 * step, "progress/phase": float(step > 1000)}
      file.write(json.dumps(row) + "\n")
  with (folder / "layers.jsonl").open("w") as file:
    load = [[1 / EXPERTS] * EXPERTS for _ in range(LAYERS)]
    for step in range(layer_rows):
      row = {"step": step, "moe/load": load, "moe/layer_entropy": [1.0] * LAYERS}
      file.write(json.dumps(row) + "\n")


def main(argv: list[str]) -> None:
  """Write a run, read it, and make its page."""
  del argv
  with tempfile.TemporaryDirectory() as name:
    write_run(Path(name), _ROWS.value, _LAYER_ROWS.value)
    began, used = time.perf_counter(), time.process_time()
    run = read_run(name)
    read = time.perf_counter()
    page = html_page(make_report([run]))
    made, used = time.perf_counter(), time.process_time() - used
  print(
    f"{_ROWS.value:,} rows, {_LAYER_ROWS.value:,} of layers: read in {read - began:.2f} s, page in "
    f"{made - read:.2f} s, {used:.2f} s of processor time, {len(page.encode()) / 1e6:.3f} MB"
  )


if __name__ == "__main__":
  cli.run(main)
