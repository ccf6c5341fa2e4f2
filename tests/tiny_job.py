"""A run that is over in seconds, for jobs of several processes: its text and settings."""

import random
from pathlib import Path

SETTINGS = (
  "model.num_layers=1",
  "model.d_model=32",
  "model.num_heads=2",
  "model.num_kv_heads=2",
  "model.d_ff=32",
  "data.validation_fraction=0.2",
  "data.tokenizer=bytes",
  "data.seq_len=32",
  "data.batch_size=8",
  "optimizer.warmup_steps=5",
  "optimizer.schedule=constant",
  "checkpoint.every_steps=20",
  "eval.every_steps=0",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
  "log.writers=console,jsonl",
  "sample.max_tokens=0",
)


def settings(folder: Path, steps: int) -> tuple[str, ...]:
  """Write a text into `folder`; the settings of a run on it."""
  text, draw = folder / "text", random.Random(0)
  text.mkdir()
  for i in range(40):
    (text / f"{i}.txt").write_text(" ".join(draw.choices(("def", "self", "in", "x"), k=60 + i)))
  return (*SETTINGS, f"num_steps={steps}", f"data.paths={text}")
