"""Runs in a test's own process: their text, their settings, and what they log."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from helpers import CACHED, tiny_config

from ats_jax.config import Config
from ats_jax.metrics.rows import read_jsonl
from ats_jax.step.program import Program

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
# Each step is logged; nothing is shown, and no part of a run takes longer than its steps.
RUN = CACHED | {
  "num_steps": 6,
  "model.vocab_size": 384,
  "model.num_layers": 1,
  "data.validation_fraction": 0.3,
  "log.writers": ("jsonl",),
  "log.every_steps": 1,
  "log.progress": False,
  "sample.max_tokens": 0,
}


def write_texts(folder: Path, count: int = 30) -> str:
  """Small texts of a few words in a new folder."""
  folder.mkdir()
  draw = random.Random(0)
  for i in range(count):
    (folder / f"{i}.txt").write_text(" ".join(draw.choices(WORDS, k=draw.randint(5, 60))))
  return str(folder)


def configs(settings: dict[str, Any]) -> Callable[..., Config]:
  """A function that gives the config of a run: its arguments are changes, `section__name=value`."""
  return lambda **changes: tiny_config(
    RUN | settings | {name.replace("__", "."): value for name, value in changes.items()}
  )


def on_texts(folder: Path, settings: dict[str, Any], count: int = 30) -> Callable[..., Config]:
  """The same, of runs on small texts in a folder."""
  paths = {
    "data.paths": (write_texts(folder / "texts", count),),
    "data.cache_dir": str(folder / "cache"),
  }
  return configs(paths | settings)


def logged(folder: Path, name: str) -> dict[int, float]:
  """The values of a metric by step."""
  rows = [row for row in read_jsonl(folder / "metrics.jsonl") if name in row]
  return {row["step"]: row[name] for row in rows}


def assert_same(one: Any, other: Any) -> None:
  """The arrays of two trees are equal, bit for bit."""
  data = lambda x: (
    jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  )
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(data(a), data(b))


def compiled_steps(monkeypatch) -> list[tuple[Config, int, Any]]:
  """A list of the steps that are compiled from now on: config, length of a row, program."""
  found, compile_train_step = [], Program.compile_train_step

  def counted(program, state, rules, seq_len=None):
    step = compile_train_step(program, state, rules, seq_len)
    found.append((program.cfg, seq_len, step))
    return step

  monkeypatch.setattr(Program, "compile_train_step", counted)
  return found
