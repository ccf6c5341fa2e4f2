"""The number of steps of a run whose config counts epochs, phases, FLOPs or a budget."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ats_jax.config import Config
from ats_jax.config.build import CHANGES, count_epochs, resolve
from ats_jax.config.schema.mixture import check_rates
from ats_jax.data.batch import POSITION
from ats_jax.data.rows.contract import TrainRows
from ats_jax.data.sources import mixture_phases


def with_num_steps(
  cfg: Config, train_set: TrainRows, done: tuple[int, int] = (0, 0)
) -> tuple[Config, str]:
  """Return `cfg` with its number of steps, and what decided that number, in words.

  Args:
    cfg: the run.
    train_set: rows of the training split.
    done: the steps that were made, and the rows that they read.

  Raises:
    ValueError: as `count_epochs`.
  """
  if not cfg.counts_epochs:
    return cfg, "num_steps"
  info = train_set.info
  if cfg.length == "phases":
    return count_epochs(cfg, 1.0, info.scheduled_rows, done), "the lengths of data.phases"
  epochs, why = cfg.num_epochs, f"num_epochs={cfg.num_epochs}"
  if cfg.length in ("budget", "flops"):
    from ats_jax.planner.budget import budget, budget_reason  # here: other runs need no planner

    sized = resolve(cfg, info.tokenizer.vocab_size)
    plan = budget(sized, unique_tokens=info.num_tokens)
    if cfg.length == "flops":
      rows = plan["budget"]["tokens"] / cfg.data.seq_len
      per_token = plan["model"]["flops_per_token"]
      why = f"train_flops={cfg.train_flops:g}, {per_token:.4g} a token"
      return count_epochs(cfg, rows, 1, done), why
    bounds = f"least_epochs={cfg.least_epochs:g}, most_epochs={cfg.most_epochs:g}"
    epochs, why = plan["budget"]["epochs"], f"{budget_reason(plan)}; {bounds}"
  return count_epochs(cfg, epochs, info.num_rows, done), why


def with_phase_steps(cfg: Config, train_set: TrainRows) -> Config:
  """`cfg` with phases in steps where it says epochs, for what happens as each begins.

  Raises:
    ValueError: for a warm-up that is longer than its phase.
  """
  if not any(phase.epochs for phase in cfg.data.phases[:-1]):
    return cfg
  sizes = {name: part.info.num_rows for name, part in train_set.info.parts.items()}
  counted = mixture_phases(cfg.data, sizes)
  phases = tuple(
    dataclasses.replace(phase, epochs=0.0, steps=rows.rows // cfg.data.batch_size)
    if phase.epochs
    else phase
    for phase, rows in zip(cfg.data.phases, counted, strict=True)
  )
  data = dataclasses.replace(cfg.data, phases=phases)
  cfg = dataclasses.replace(cfg, data=data)
  check_rates(cfg)
  return cfg


def rows_read(
  cfg: Config, train_set: TrainRows, step: int, extra: Mapping[str, Any]
) -> tuple[int, int]:
  """The step and row that a checkpoint is at, as `done` of `with_num_steps`.

  Steps before it may have had another `data.batch_size`. One that an orchestrator chose is left
  out: it comes with a `num_steps` of its own.

  Raises:
    ValueError: for a position in other data, and for another batch size with several phases, since
      the steps and rows at which they begin would part.
  """
  if POSITION not in extra or "data.batch_size" in extra.get(CHANGES, {}):
    return step, step * cfg.data.batch_size
  row = train_set.row_of(extra[POSITION])
  if row != step * cfg.data.batch_size and len(cfg.data.phases) > 1:
    raise ValueError(
      f"data.batch_size={cfg.data.batch_size}, but the first {step:,} steps read {row:,} rows. "
      "With several data.phases the batch size cannot change, as rows and steps would no longer "
      "agree on where a phase begins. Go on with the old one."
    )
  return step, row
