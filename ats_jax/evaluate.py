"""Loss, perplexity and bits per byte of a trained run on its validation split, or on other text.

  ats-jax evaluate --workdir=runs/debug --step=best
  ats-jax evaluate --workdir=runs/debug --paths=other.txt

Prints a line a metric: eval/loss, eval/perplexity, eval/accuracy, eval/bits_per_byte.
"""

from absl import flags, logging

from ats_jax import cli, paths, workdir
from ats_jax.checkpoint import load_extra
from ats_jax.data.batch import POSITION
from ats_jax.data.loader import row_of
from ats_jax.data.splits import EvalSet, open_datasets, open_eval_sets, open_split
from ats_jax.inference.load import load_run
from ats_jax.scoring import score_all

FLAGS = flags.FlagValues()
_WORKDIR = cli.define_workdir_flag(FLAGS)
_STEP = cli.define_step_flag(FLAGS)
_PATHS = flags.DEFINE_string(
  "paths", "", "Evaluate on these files instead (as data.paths).", flag_values=FLAGS
)


def main(argv: list[str]) -> None:
  """Print the metrics of a checkpoint."""
  del argv
  folder = paths.parse(cli.require(_WORKDIR.value, "workdir", "runs/debug"))
  with load_run(folder, _STEP.value) as run:
    cfg = run.program.cfg
    if _PATHS.value:
      sets = (EvalSet("", open_split(cfg.data, cfg.seed, _PATHS.value, run.tokenizer)),)
    else:
      train_set, main_set = open_datasets(cfg.data, cfg.seed)
      row_of(train_set, load_extra(folder / workdir.CHECKPOINTS, run.step)[POSITION])
      sets = open_eval_sets(cfg.data, main_set)
    if not sets:
      raise ValueError(
        f"evaluation: the validation split is empty, as {folder} was trained without one. Train "
        "with data.validation_fraction or data.validation_paths, or give other text by --paths."
      )
    metrics = score_all(run.program, run.model, sets, run.step)
    logging.info("checkpoint %d of %s", run.step, folder)
    for name, value in metrics.items():
      print(f"{name} {value:.6g}")


COMMANDS = {"": cli.Command(main, FLAGS, __doc__)}
if __name__ == "__main__":
  cli.main("evaluate", COMMANDS)
