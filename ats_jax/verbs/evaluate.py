"""Loss, perplexity and bits per byte of a trained run on its validation split, or on other text.

  ats-jax evaluate --workdir=runs/debug --step=best
  ats-jax evaluate --workdir=runs/debug --paths=other.txt
  ats-jax evaluate --workdir=runs/debug --paths=web=other.txt,code=src
  ats-jax evaluate --workdir=runs/base --adapter=adapters/math,adapters/code
  ats-jax evaluate --workdir=runs/debug --tasks=my_tasks,arc_easy --num_fewshot=5

Prints a line a metric: eval/loss, eval/perplexity, eval/accuracy, eval/bits_per_byte; those of a
set by name are under eval/NAME. --adapter names folders of peft: metrics of the run alone are under
base/, those with each adapter under its name. --tasks names tasks of lm-evaluation-harness, their
YAML files or folders of these, whose metrics are printed instead, as TASK/METRIC.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from absl import flags, logging

from ats_jax.checkpoint import workdir
from ats_jax.config.schema.setting import Table
from ats_jax.config.text import parse_as
from ats_jax.data.batch import POSITION
from ats_jax.data.sources import EvalSet, open_data, open_eval_sets
from ats_jax.data.splits import open_split
from ats_jax.data.text.source import MissingTextError
from ats_jax.inference.engine.options import DEFAULT, Options
from ats_jax.inference.load import load_run
from ats_jax.store import paths
from ats_jax.store.paths import Path
from ats_jax.train.evaluate import score_all
from ats_jax.train.fields import sets_with_fields
from ats_jax.verbs import cli
from ats_jax.verbs.adapters import by_name, define_adapter_flag, each
from ats_jax.verbs.drawing import EngineFlag

NAME = re.compile("[a-z][a-z0-9_-]*=")
FLAGS = flags.FlagValues()
_WORKDIR = cli.define_workdir_flag(FLAGS)
_STEP = cli.define_step_flag(FLAGS)
_COMPUTE_DTYPE = cli.define_compute_dtype_flag(FLAGS)
_ADAPTER = define_adapter_flag(FLAGS)
_ENGINE = EngineFlag(FLAGS)
_PATHS = flags.DEFINE_string(
  "paths",
  "",
  "Evaluate on these files instead (as data.paths), or on sets by name: web=a.txt,code=src.",
  flag_values=FLAGS,
)
_TASKS = flags.DEFINE_list(
  "tasks", [], "Tasks of lm-evaluation-harness: names, files, folders.", flag_values=FLAGS
)
_NUM_FEWSHOT = flags.DEFINE_integer(
  "num_fewshot", None, "With --tasks: examples before each question.", 0, flag_values=FLAGS
)
_LIMIT = flags.DEFINE_integer(
  "limit", None, "With --tasks: documents of each task at most.", 1, flag_values=FLAGS
)
_JSON = flags.DEFINE_boolean(
  "json", False, "Print the metrics as one JSON object.", flag_values=FLAGS
)


def evaluate_run(
  folder: Path,
  step: str,
  text: Sequence[str] | Mapping[str, Sequence[str]] = (),
  compute_dtype: str = "",
  adapters: Mapping[str, pathlib.Path] = MappingProxyType({}),
) -> tuple[int, dict[str, float]]:
  """The step of a checkpoint, and its metrics.

  Args:
    folder: the workdir.
    step: a step, "latest" or "best".
    text: in place of the validation split, as `data.paths`; of several sets by name.
    compute_dtype: of matmuls, as of `load_run`.
    adapters: folders of peft's by name, which is then in front of the metrics, as "base" is.

  Raises:
    ValueError: if there is no such run, checkpoint, text or adapter, or its own text has changed.
  """
  with load_run(folder, step, compute_dtype) as run:
    cfg = run.program.cfg
    if text:
      by_name = text if isinstance(text, Mapping) else {"": text}
      split = lambda files: open_split(cfg.data, cfg.seed, files, run.tokenizer)
      sets = tuple(EvalSet(name, split(files)) for name, files in by_name.items())
    elif POSITION not in run.extra:  # of an import, or of runs that were merged
      raise ValueError(
        f"evaluation: {folder} holds weights that were not trained there, so it has no validation "
        "split. Give text by --paths."
      )
    else:
      try:
        train_set, main_set = open_data(cfg.data, cfg.seed)
        train_set.row_of(run.extra[POSITION])
        sets = open_eval_sets(cfg.data, main_set)
      except MissingTextError as e:
        raise ValueError(
          f"{e} The config of {folder} names its text as seen from {workdir.started_in(folder)}, "
          "where the training was started. Evaluate there, or give the text by --paths."
        ) from e
    if not sets:
      raise ValueError(
        f"evaluation: the validation split is empty, as {folder} was trained without one. Train "
        "with data.validation_fraction or data.validation_paths, or give other text by --paths."
      )
    sets = sets_with_fields(run.program, folder, None, sets)
    metrics: dict[str, float] = {}
    for name, one in each(run, folder, adapters):
      metrics |= _under(name, score_all(run.program, one.model, sets, run.step))
    return run.step, metrics


def _under(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
  """Metrics with the name of an adapter in front, if there is one."""
  return {f"{name}/{key}" if name else key: value for key, value in metrics.items()}


def parse_paths(text: str) -> tuple[str, ...] | Table[tuple[str, ...]]:
  """Paths, or sets of them by name: those with `NAME=` in front, unless there is such a file.

  Raises:
    ValueError: if only some have a name.
  """
  files = parse_as(tuple[str, ...], text, "paths")
  named = [NAME.match(file) and not paths.parse(file).exists() for file in files]
  if not any(named):
    return files
  if not named[0]:
    raise ValueError(f"--paths={text}: {files[0]!r} has no name, and others have. Give it one.")
  return parse_as(Table[tuple[str, ...]], text, "paths")


def tasks_of_run(
  workdir: str,
  tasks: Sequence[str],
  *,
  step: str = "latest",
  compute_dtype: str = "",
  options: Options = DEFAULT,
  num_fewshot: int | None = None,
  limit: int | None = None,
  adapters: Mapping[str, pathlib.Path] = MappingProxyType({}),
) -> dict[str, float]:
  """The metrics of tasks (`harness.evaluate_tasks`), done by a checkpoint of a run.

  `adapters` is as of `evaluate_run`.

  Raises:
    ValueError: if there is no such run, checkpoint, task or adapter, or the harness is not
      installed.
  """
  try:
    from ats_jax.inference import harness  # an extra
  except ModuleNotFoundError as e:
    if (e.name or "").partition(".")[0] != "lm_eval":
      raise
    raise ValueError("--tasks needs lm-evaluation-harness: pip install 'ats_jax[lm_eval]'.") from e
  of_engine = dataclasses.asdict(options)
  with contextlib.closing(harness.RunLM(workdir, step, compute_dtype, **of_engine)) as model:
    metrics: dict[str, float] = {}
    for name, run in each(model.run, paths.parse(workdir), adapters):
      found = harness.evaluate_tasks(model.with_run(run), tasks, num_fewshot, limit)
      metrics |= _under(name, found)
    return metrics


def main(argv: list[str]) -> None:
  """Print the metrics of a checkpoint."""
  del argv
  workdir = cli.require(_WORKDIR.value, "workdir", "runs/debug")
  if _TASKS.value and _PATHS.value:
    raise ValueError("--tasks and --paths both say what to evaluate on. Use one of them.")
  adapters = by_name(_ADAPTER.value)
  if not _TASKS.value and (_NUM_FEWSHOT.value, _LIMIT.value) != (None, None):
    raise ValueError("--num_fewshot and --limit are of tasks: they need --tasks.")
  options = _ENGINE.value
  if options != DEFAULT and not _TASKS.value:
    raise ValueError("--engine is of what does tasks: it needs --tasks.")
  if _TASKS.value:
    metrics = tasks_of_run(
      workdir, _TASKS.value, step=_STEP.value, compute_dtype=_COMPUTE_DTYPE.value,
      options=options, num_fewshot=_NUM_FEWSHOT.value, limit=_LIMIT.value, adapters=adapters,
    )  # fmt: skip
  else:
    folder, text = paths.parse(workdir), parse_paths(_PATHS.value)
    step, metrics = evaluate_run(folder, _STEP.value, text, _COMPUTE_DTYPE.value, adapters)
    logging.info("checkpoint %d of %s", step, folder)
  if _JSON.value:
    print(json.dumps(metrics))
    return
  for name, value in metrics.items():
    print(f"{name} {value:.6g}")


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
