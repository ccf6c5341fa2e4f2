"""What rows of several lengths are worth: validation loss at equal tokens, and at equal time.

  python -m lab.length_curriculum --steps=150 --seeds=2

Documents are paragraphs (between empty lines) of Python's standard library, as bytes. Validation
rows have the full length in every run. A step's time is the median of those with its length of rows
in the same run, without compilation. The last row is a run on full rows that gets the time of the
curriculum's steps, in more steps or fewer.
"""

import json
import re
import statistics
import sysconfig
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags

from ats_jax.config import from_config_dict
from ats_jax.config.build import resolve
from ats_jax.data.sources import open_data
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.program import make_program
from ats_jax.train.evaluate import score
from ats_jax.train.feed import train_feed
from lab.runs import markdown, tiny_config

_STEPS = flags.DEFINE_integer("steps", 150, "Updates of a run.")
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each kind.")
_MEGABYTES = flags.DEFINE_float("megabytes", 0.4, "Text to train on.")
KINDS: dict[str, dict[str, Any]] = {
  "full rows": {},
  "up to 3 lengths, mixed": {"data.order": {"name": "buckets", "lengths": 3}},
  "up to 3 lengths, short first": {"data.order": {"name": "length", "lengths": 3}},
  "full rows, easy first": {"data.order": "difficulty"},
}
TIMED = "up to 3 lengths, short first"


class Found(NamedTuple):
  """The validation loss at the end; of each length of rows, its steps and the seconds of one."""

  loss: float
  steps: dict[int, int]
  secs: dict[int, float]


def write_texts(path: Path, megabytes: float) -> None:
  """Paragraphs of the standard library, one JSON object each."""
  size = 0
  with open(path, "w") as out:
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
      for part in re.split(r"\n\s*\n", file.read_text(errors="ignore")):
        size += out.write(json.dumps({"text": part}) + "\n")
        if size > megabytes * 1e6:
          return


def train(changes: dict[str, Any]) -> Found:
  """One run, without checkpoints or logs."""
  cfg = from_config_dict(tiny_config(changes))
  train_set, valid_set = open_data(cfg.data, cfg.seed)
  cfg = resolve(cfg, train_set.info.tokenizer.vocab_size)
  mesh, times = make_mesh(cfg), defaultdict(list)
  with jax.set_mesh(mesh), train_feed(cfg, train_set) as batches:
    program = make_program(cfg)
    state = program.init()
    for step in range(1, cfg.num_steps + 1):
      length, batch = batches.row_length, to_global(next(batches), mesh)
      began = time.perf_counter()
      state, metrics = program.train_step(state, batch, program.training_rules(step))
      metrics.values.block_until_ready()
      times[length].append(time.perf_counter() - began)
    scores = score(program, state.weights, valid_set, cfg.num_steps)
  steps = {length: len(took) for length, took in sorted(times.items())}
  return Found(scores["eval/loss"], steps, {n: statistics.median(times[n]) for n in steps})


def main(argv: list[str]) -> None:
  """Print the table."""
  del argv
  found: dict[str, list[Found]] = defaultdict(list)
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "texts.jsonl"
    write_texts(path, _MEGABYTES.value)
    common = {
      "model.d_model": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.d_ff": 96,
      "model.vocab_size": 384, "data.paths": (str(path),), "data.cache_dir": f"{folder}/cache",
      "data.seq_len": 512, "data.batch_size": 4, "optimizer.learning_rate": 3e-3,
      "optimizer.warmup_steps": 20, "eval.num_batches": 8, "eval.bigram_baseline": False,
      "orchestrator.mode": "off",
    }  # fmt: skip
    for seed in range(_SEEDS.value):
      for name, changes in KINDS.items():
        found[name].append(train({**common, **changes, "num_steps": _STEPS.value, "seed": seed}))
        print(seed, name, found[name][-1], flush=True)
      timed = found[TIMED][-1]
      whole = sum(count * timed.secs[length] for length, count in timed.steps.items())
      steps = round(whole / timed.secs[max(timed.secs)])
      name = f"full rows, in the time of '{TIMED}'"
      found[name].append(train({**common, "num_steps": steps, "seed": seed}))
      print(seed, name, found[name][-1], flush=True)
  rows = []
  for name, runs in found.items():
    first = runs[0]
    ms = {length: 1e3 * secs for length, secs in first.secs.items()}
    steps = [f"{count} of {length} ({ms[length]:.0f} ms)" for length, count in first.steps.items()]
    rows.append([name, ", ".join(f"{r.loss:.4f}" for r in runs), ", ".join(steps)])
  print(markdown(["rows", "validation loss, by seed", "steps of each length, first seed"], rows))


if __name__ == "__main__":
  app.run(main)
