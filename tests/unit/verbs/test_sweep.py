"""Sweeps: candidates, their processes, the table."""

import json
import re

import pytest
from commands import called

from ats_jax.verbs.bench import sweep
from ats_jax.verbs.bench.sweep import (
  Candidate,
  as_flags,
  best,
  combinations,
  parse_tries,
  reason,
  table,
)

SMALL = ("model.num_layers=1", "model.d_model=32", "model.d_ff=32", "data.seq_len=32")
RAN = {"tokens_per_sec": 1e4, "step_secs": 0.1, "model_flops_per_sec": 1e12, "mfu": None}


def test_every_combination_in_the_types_of_the_settings():
  tries = parse_tries(["step.remat=dots,full", "precision.fp8=false,True", "optimizer.b1=0.5"])
  found = combinations(tries)
  assert len(found) == 4
  assert found[0] == {"step.remat": "dots", "precision.fp8": False, "optimizer.b1": 0.5}
  assert as_flags(found[3]) == (
    "--config.step.remat=full --config.precision.fp8=true --config.optimizer.b1=0.5"
  )
  assert len(combinations(parse_tries(list(sweep.DEFAULT_TRIES)))) == 6
  sizes = combinations(parse_tries(["config=debug,debug:moe", "mesh.fsdp=2"]))
  assert as_flags(sizes[1]) == "--config=debug:moe --config.mesh.fsdp=2"


def test_what_cannot_be_tried():
  for text, message in (
    ("step.remats=dots", "expected SETTING=VALUE"),
    ("step.remat", "expected SETTING=VALUE"),
    ("precision.fp8=yes", "'yes' is no bool"),
    ("step.accum_steps=1,2.5", "'2.5' is no int"),
  ):
    with pytest.raises(ValueError, match=re.escape(message)):
      parse_tries([text])


def test_the_best_has_the_most_model_flops():
  small = Candidate({"model.num_layers": 2}, RAN | {"tokens_per_sec": 9e4}, "")
  large = Candidate({"model.num_layers": 9}, RAN | {"model_flops_per_sec": 2e12}, "")
  lost = Candidate({"model.num_layers": 99}, {}, "does not fit: | too large")
  assert best([small, large, lost]) is large
  assert best([lost]) is None
  lines = table([small, large, lost]).splitlines()
  assert lines[0] == "| model.num_layers | tokens/s | ms | model TFLOP/s |  |"  # no empty columns
  assert lines[2] == "| 2 | 90,000 | 100.0 | 1.00 |  |"
  assert lines[3] == "| **9** | 10,000 | 100.0 | 2.00 |  |"
  assert lines[4] == "| 99 |  |  |  | does not fit: / too large |"


def test_the_reason_is_the_last_error_of_a_process():
  assert reason("a\nerror: x=1 is wrong\n(ATS_TRACEBACK=1 shows where.)\n") == "x=1 is wrong"
  traceback = "Traceback\n  File\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out\n----\nnote"
  assert reason(traceback) == "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out"
  assert reason("12:00 all is well") == ""


@pytest.mark.thorough
def test_candidates_that_cannot_run_are_rows(tmp_path):
  flags = ["--config=configs/debug.py", *(f"--config.{s}" for s in SMALL), "--steps=2"]
  flags += ["--try=data.batch_size=16,15", "--try=step.accum_steps=2", "--memory_gib=0.1"]
  result = called("bench", "sweep", *flags, f"--out={tmp_path}/out")
  assert result.code == 0, result.err
  rows = [json.loads(line) for line in (tmp_path / "out" / "sweep.jsonl").read_text().splitlines()]
  ran, odd = rows
  assert ran["error"] == "" and ran["found"]["tokens_per_sec"] > 0
  assert ran["changes"] == {"data.batch_size": 16, "step.accum_steps": 2}
  assert "step.accum_steps=2 does not divide data.batch_size=15" in odd["error"]
  assert not odd["found"]
  assert result.out == (tmp_path / "out" / "sweep.md").read_text()
  assert result.out.endswith("\nbest: --config.data.batch_size=16 --config.step.accum_steps=2\n")
  again = called("bench", "sweep", *flags, f"--out={tmp_path}/out")
  assert "is not empty" in again.error()


def test_a_candidate_that_takes_too_long_is_given_up():
  flags = ["--config=configs/debug.py", "--try=step.remat=full", "--limit_secs=1"]
  result = called("bench", "sweep", *flags)
  assert result.code == 0, result.err
  assert "given up after 1 s" in result.out and result.out.endswith("\nnone of them ran\n")
