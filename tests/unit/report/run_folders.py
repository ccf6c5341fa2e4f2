"""Folders of runs that were never trained, as the report reads them."""

import datetime
import json
import math
from pathlib import Path
from typing import Any

from ats_jax.config import base_config, from_config_dict
from ats_jax.config.names import to_dict
from ats_jax.config.tree import updated
from ats_jax.orchestrator.actions import Repeat, Rollback
from ats_jax.orchestrator.record.ledger import Ledger
from ats_jax.orchestrator.trials.arms import Arm, Proposal, Score

BEGAN = 1_764_000_000.0
SPOILED = "<script>alert(1)</script> & </script> \u202e"


def write_run(
  folder: Path,
  rows: list[dict[str, Any]],
  changes: dict[str, Any] | None = None,
  *,
  log: tuple[str, ...] = (),
  num_steps: int = 100,
) -> Path:
  """Write config.json, metadata.json, metrics.jsonl and log.txt of a run that began at `BEGAN`."""
  folder.mkdir(parents=True)
  config = updated(base_config(), {"num_steps": num_steps, **(changes or {})})
  settings = to_dict(from_config_dict(config))
  (folder / "config.json").write_text(json.dumps({"format": 3, **settings}))
  when = datetime.datetime.fromtimestamp(BEGAN, datetime.UTC).isoformat()
  facts = {"time": when, "device_count": 2, "device_kinds": ["cpu"], "backend": "cpu"}
  facts |= {"packages": {"jax": "0.12"}, "run": {"parameters": 1000}}
  (folder / "metadata.json").write_text(json.dumps(facts))
  lines = [json.dumps({"step": 0, "wall_time": BEGAN + 60, **row}) + "\n" for row in rows]
  (folder / "metrics.jsonl").write_text("".join(lines))
  start = "2026-11-28 09:00:00 INFO    devices: 2 x cpu"
  (folder / "log.txt").write_text("\n".join([start, *log, ""]))
  return folder


def training(
  steps: range, start: float = 5.0, seed: float = 0.0, **more: float
) -> list[dict[str, Any]]:
  """Rows of a training whose loss falls by 0.01 a step; `seed` is added to it."""
  return [
    {
      "step": step,
      "wall_time": BEGAN + step,
      "train/loss": start - 0.01 * step + seed,
      "train/tokens_per_sec": 64.0,
      "train/tflops_per_device": 1.0,
      "progress/tokens": 64.0 * step,
      "progress/share": step / 100,
      "progress/phase": 0.0 if step <= 20 else 2.0,
      **more,
    }
    for step in steps
  ]


def end(step: int, secs: float = 120.0) -> dict[str, Any]:
  """The row of a start that ended by itself."""
  parts = {"goodput/step_secs": 0.75 * secs, "goodput/compile_secs": 0.25 * secs}
  return {"step": step, "wall_time": BEGAN + 200, "goodput/wall_secs": secs, **parts}


def facts(**changes: Any) -> dict[str, Any]:
  """A part of data.json: 8 documents."""
  quantiles = {"least": 3, "10%": 3, "median": 9, "90%": 20, "greatest": 30}
  return {
    "name": "training", "documents": 8, "tokens": 100, "rows": 7, "seq_len": 16,
    "bytes_per_token": 3.5, "ids_used": 60, "ids": 64, "is_complete": True, "left_out": {},
    "first": [], "lengths": quantiles, "by_size": {"1": 2, "3": 4, "4": 2}, **changes,
  }  # fmt: skip


def made_again(path: Path) -> None:
  """Write a ledger in which steps 31 to 50 are made again, with a loss of 2 and one of NaN."""
  proposal = Proposal("copies", "copies differ", (Arm((Repeat(),), "copies", 0.0),))
  won, lost = (Score({"": loss}, (loss,) * 10, 1.0) for loss in (2.0, 9.0))
  book = Ledger(path)
  book.write("comparison", 50, first=40, proposal=proposal.to_json(), waiting=lost._asdict(),
             scores=[won._asdict()], made=20, losses=[2.0] * 19 + [math.nan])  # fmt: skip
  book.write("decision", 50, Repeat(), id=0, cause="copies", reason="copies differ", applied=True,
             to=30, lost={"steps": 0, "tokens": 0, "secs": 0.0})  # fmt: skip
  book.close()


def rolled_back(path: Path) -> None:
  """Write a ledger with a rollback at step 50."""
  book = Ledger(path)
  book.write("decision", 50, Rollback(), id=0, cause="state", reason=f"weights: {SPOILED}",
             applied=True, to=40, lost={"steps": 10, "tokens": 640, "secs": 9.0})  # fmt: skip
  book.close()
