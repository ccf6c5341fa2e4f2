"""The sensitivity to the learning rate: figures by hand, and runs that go on where they stopped."""

import json

import pytest
from commands import forked
from xla_flags import FAST_STEPS

from lab.rate_sensitivity import SIZES, sensitivity, suite, table


def record(rate, arm, loss, seed=0):
  return {"size": "toy", "rate": rate, "arm": arm, "seed": seed, "loss": loss, "initial": 5.0,
          "steps": 100, "spikes": {"train/loss": 0.01, "train/grad_norm": 0.0}}  # fmt: skip


def test_what_is_above_the_first_loss_counts_as_that():
  assert sensitivity([2.0, 2.5, 9.0], initial=5.0) == pytest.approx((2.0 + 2.5 + 5.0) / 3 - 2.0)
  assert sensitivity([2.0, 2.0], initial=5.0) == 0.0


def test_the_table_has_means_of_the_seeds_in_the_order_of_the_rates():
  runs = [record(0.1, "clip", 5.5), record(0.01, "clip", 2.0), record(0.01, "ours", 2.0)]
  runs += [record(0.01, "ours", 2.2, seed=1), record(0.1, "ours", 2.3)]
  assert table(runs).splitlines() == [
    "| toy, 100 steps, 5.000 at first | clip | ours |",
    "| --- | --- | --- |",
    "| 0.01 | 2.000 | 2.100 |",
    "| 0.1 | 5.500 | 2.300 |",
    "| **sensitivity** | 1.500 | 0.100 |",
    "",
    "| toy: spike score of loss, of gradient norm, % | clip | ours |",
    "| --- | --- | --- |",
    "| 0.01 | 1.000, 0.000 | 1.000, 0.000 |",
    "| 0.1 | 1.000, 0.000 | 1.000, 0.000 |",
  ]


@pytest.mark.parametrize("size", SIZES)
def test_the_settings_are_those_of_the_paper(size):
  given = dict(suite(size, 0.01, 1000).settings)
  assert given["optimizer.weight_decay"] * given["optimizer.learning_rate"] == pytest.approx(1e-4)
  assert given["optimizer.schedule"] == "cosine" and given["optimizer.warmup_steps"] == 50
  assert "model.qk_norm" not in given  # which is off


@pytest.mark.thorough
def test_the_same_command_goes_on(tmp_path):
  """With one rate more than before, it makes the runs of that rate."""
  path, secs = tmp_path / "rates.jsonl", []
  for rates in ("3e-3", "3e-3,1"):
    flags = ("--sizes=toy", "--arms=clip", "--steps=100", f"--rates={rates}", f"--results={path}")
    result = forked("lab.rate_sensitivity", "run", *flags, XLA_FLAGS=FAST_STEPS)
    assert result.code == 0, result.err
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    assert [run["rate"] for run in runs] == [float(rate) for rate in rates.split(",")]
    secs.append(runs[0]["secs"])
  assert secs[0] == secs[1]  # it was not made again
  good, bad = (run["loss"] for run in runs)
  assert good < bad < runs[0]["initial"] and "| **sensitivity** |" in result.out


def test_what_is_unknown_is_said_in_one_line(tmp_path):
  for flag, says in {
    "--sizes=1t": "--sizes=1t is unknown. Choose of: toy, 10m, 26m, 110m.",
    "--arms=mine": "--arms=mine is unknown.",
    "--rates=high": "--rates=high: give positive numbers",
  }.items():
    result = forked("lab.rate_sensitivity", "run", flag, f"--results={tmp_path / 'r.jsonl'}")
    assert result.code and says in result.err and "Traceback" not in result.err
