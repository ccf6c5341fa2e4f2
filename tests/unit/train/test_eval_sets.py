"""Several evaluation sets in one evaluation: each is scored as it would be alone."""

import re

import jax
from helpers import make_test_mesh, tiny_config

from ats_jax.data.sources import open_eval_sets
from ats_jax.data.splits import open_datasets
from ats_jax.step.program import make_program
from ats_jax.train import report
from ats_jax.train.evaluate import score, score_all


def test_each_set_has_metrics_of_its_own(tmp_path, caplog):
  texts = {"train": "abcdefgh " * 40, "main": "bcdefgha " * 9, "code": "x = y(z)\n" * 30}
  for name, text in texts.items():
    (tmp_path / f"{name}.txt").write_text(text)
  cfg = tiny_config(
    {
      "model.vocab_size": 259,
      "data.paths": (str(tmp_path / "train.txt"),),
      "data.validation_paths": (f"{tmp_path}/main.txt",),
      "data.validation_sets": {"code": (f"{tmp_path}/code.txt",)},
      "data.cache_dir": str(tmp_path / "cache"),
      "eval.bigram_baseline": False,
    }
  )
  _, validation = open_datasets(cfg.data, cfg.seed)
  sets = open_eval_sets(cfg.data, validation)
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program = make_program(cfg)
    model = program.init().model
    main, code = (score(program, model, held_out.dataset, 0) for held_out in sets)
    scores = score_all(program, model, sets, 0)
  assert scores == main | {name.replace("eval/", "eval/code/"): x for name, x in code.items()}
  assert scores["eval/loss"] != scores["eval/code/loss"]
  assert (scores["eval/tokens"], scores["eval/code/tokens"]) == (9 * 9 + 1, 9 * 30 + 1)
  caplog.set_level("INFO")
  report.scores(cfg, validation, validation, scores)
  assert re.search(r"validation: loss .*, code/loss \d.*, code/tokens 271\b", caplog.text)
