"""Fields of rows that a loss needs beside those of the data (`LossConfig.ROWS`)."""

import dataclasses
import importlib
from collections.abc import Sequence

from ats_jax.data.rows.contract import Rows
from ats_jax.data.sources import EvalSet
from ats_jax.model.decoder import Decoder
from ats_jax.step.program import Program
from ats_jax.store.paths import Path


def with_fields[R: Rows](program: Program, folder: Path, model: Decoder | None, rows: R) -> R:
  """The same rows with all fields that the loss of a run needs.

  Args:
    program: the program of the run, on the current mesh.
    folder: its workdir.
    model: the weights that the run begins with; None = it has begun.
    rows: rows of the run's data.

  Raises:
    ValueError: if the run has begun, and does not know the fields of these rows.
  """
  where = program.cfg.step.loss.ROWS
  if not where:
    return rows
  module, _, name = where.partition(":")
  return getattr(importlib.import_module(module), name)(program, folder, model, rows)


def sets_with_fields(
  program: Program, folder: Path, model: Decoder | None, sets: Sequence[EvalSet]
) -> tuple[EvalSet, ...]:
  """The same evaluation sets, their rows `with_fields`."""
  if not program.cfg.step.loss.HELD_OUT:
    return tuple(sets)
  fields = lambda rows: with_fields(program, folder, model, rows)
  return tuple(dataclasses.replace(each, dataset=fields(each.dataset)) for each in sets)
