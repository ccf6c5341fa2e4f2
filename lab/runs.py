"""One training run as a function: for comparisons of many."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from ats_jax.checkpoint import workdir
from ats_jax.cluster import runtime
from ats_jax.config import base_config, from_config_dict
from ats_jax.config.build import resolve
from ats_jax.config.tree import edited
from ats_jax.data.sources import open_data
from ats_jax.model.count import Counts
from ats_jax.sharding.mesh import make_mesh, to_global
from ats_jax.step.program import make_program
from ats_jax.train.evaluate import score
from ats_jax.train.feed import train_feed
from ats_jax.train.loop import train

Changes = dict[str, Any]
WINDOW = 10  # steps that the host lets run ahead


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run gave.

  Attributes:
    series: each metric of the step, by name: [num_steps].
    scores: of the validation split at the end; empty without one.
    counts: parameters and FLOPs.
    step_secs: time of a step, the median of windows of ten; the first one compiles.
  """

  series: dict[str, np.ndarray]
  scores: dict[str, float]
  counts: Counts
  step_secs: float


def named_values(flags: Sequence[str]) -> dict[str, str]:
  """The values of a flag NAME=VALUE,NAME=VALUE that may be given several times."""
  return dict(one.split("=", 1) for text in flags for one in text.split(","))


def llama_8b(layers: int, width: int, vocab: int) -> Changes:
  """Settings of `model`: the shape of Llama 3.1 8B, with other layers, width (n * 128) or vocab."""
  heads = width // 128
  return {
    "vocab_size": vocab,
    "num_layers": layers,
    "d_model": width,
    "num_heads": heads,
    "num_kv_heads": max(1, heads // 4),
    "d_ff": 7 * width // 2,
    "tie_embeddings": False,
  }


def tiny_config(changes: Changes) -> ConfigDict:
  """Two layers on the bytes of Python's standard library; WSD with 30 % decay."""
  config = base_config()
  common: Changes = {
    "model.num_layers": 2,
    "data.tokenizer": "bytes",
    "optimizer.warmup_steps": 50,
    "optimizer.schedule": "wsd",
    "optimizer.schedule.decay_fraction": 0.3,
    "precision.compute_dtype": "float32",
    "log.writers": ("jsonl",),
    "log.progress": False,
    "sample.max_tokens": 0,
  }
  config.update_from_flattened_dict(common | changes)
  return config


def finished(folder: Path, config: ConfigDict) -> Path:
  """A workdir with the whole run of a config; trained if it is not there."""
  if not (folder / workdir.CHECKPOINTS / str(config.num_steps)).exists():
    cfg = from_config_dict(config)
    runtime.configure(cfg)
    train(cfg, folder)
  return folder


def run(
  config: ConfigDict,
  changes: Changes,
  data_seed: int | None = None,
  fp8: bool = True,
) -> Result:
  """Train without checkpoints or logs, with the production step, data and evaluation.

  Args:
    config: a config file's; not changed.
    changes: settings by dotted name.
    data_seed: of the order of the data; None = the run's.
    fp8: false = layers that the config puts in 8 bits are not.
  """
  config = edited(config.to_dict())
  config.update_from_flattened_dict(changes)
  cfg = from_config_dict(config)
  train_set, valid_set = open_data(cfg.data, cfg.seed if data_seed is None else data_seed)
  cfg = resolve(cfg, train_set.info.tokenizer.vocab_size)
  mesh = make_mesh(cfg)
  with jax.set_mesh(mesh), train_feed(cfg, train_set) as batches:
    program = dataclasses.replace(make_program(cfg), fp8=fp8)
    state = program.init()
    rows, names, times, began = [], (), [], time.perf_counter()
    for step in range(1, cfg.num_steps + 1):
      batch = to_global(next(batches), mesh)
      state, metrics = program.train_step(state, batch, program.training_rules(step))
      rows.append(metrics.values)
      names = metrics.names
      if step % WINDOW == 0:
        rows = jax.device_get(rows)
        if step % max(WINDOW, cfg.num_steps // 20) < WINDOW:
          means = np.mean(rows[-WINDOW:], axis=0)
          logging.info("step %d: loss %.3f", step, means[names.index("train/loss")])
        times.append((time.perf_counter() - began) / WINDOW)
        began = time.perf_counter()
    scores = {}
    if valid_set.info.num_rows:
      scores = score(program, state.weights, valid_set, cfg.num_steps)
  values = np.stack(jax.device_get(rows), axis=1)
  series = dict(zip(names, values, strict=True))
  return Result(series, scores, program.counts, statistics.median(times[1:]))


def markdown(header: list[str], rows: list[list[str]]) -> str:
  """A table."""
  line = lambda cells: f"| {' | '.join(cells)} |"
  return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])
