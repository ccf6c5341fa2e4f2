"""Budgets: the laws by their own mathematics and by published figures, and the command."""

import json
import math

import pytest
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from in_process import printed_by

from ats_jax.planner.budget import (
  LAWS,
  REPETITION_DECAY,
  Law,
  budget,
  effective_tokens,
  parse_law,
  render_budget,
  tokens_worth,
)

LAW = LAWS["besiroglu"]
VOCABULARY = {"model.vocab_size": 384}
MOE = VOCABULARY | {"moe.num_experts": 8}
MOD = VOCABULARY | {"mod.routing": "learned", "mod.capacity": 0.25, "mod.every": 1}
EXPONENT = st.floats(0.2, 0.6)


@pytest.mark.parametrize(
  ("law", "flops", "ratio"),
  [
    ("besiroglu", 1e18, 25.7),
    ("besiroglu", 5.76e23, 18.4),  # Chinchilla was trained with 20
    ("hoffmann", 1e18, 26),
    ("hoffmann", 5.8e23, 93),
  ],
)
def test_tokens_a_parameter_at_the_optimum(law, flops, ratio):
  parameters, tokens = LAWS[law].optimum(flops)
  assert tokens / parameters == pytest.approx(ratio, rel=0.02)
  assert 6 * parameters * tokens == pytest.approx(flops)


@given(st.floats(1e17, 1e26), EXPONENT, EXPONENT, st.floats(0.5, 2.0))
def test_no_other_size_makes_more_of_the_compute(flops, alpha, beta, other):
  law = Law(1.7, 400.0, 2000.0, alpha, beta)
  parameters, tokens = law.optimum(flops)
  best = law.loss(parameters, tokens)
  assert law.loss(parameters * other, tokens / other) >= best - 1e-12
  assert law.optimal_tokens(parameters) == pytest.approx(tokens, rel=1e-6)
  assert law.flops_for(best) == pytest.approx(flops, rel=1e-6)


@pytest.mark.parametrize(
  ("epochs", "worth"), [(1, 1.0), (2, 1.97), (4, 3.73), (8, 6.62), (16, 10.6), (40, 15.2)]
)
def test_what_epochs_are_worth(epochs, worth):
  assert effective_tokens(epochs * 1e9, 1e9) == pytest.approx(worth * 1e9, rel=0.005)


@given(st.floats(1e6, 1e13), st.floats(0.01, 30.0))
def test_repeated_tokens_are_worth_less_and_the_way_back(unique, epochs):
  tokens = epochs * unique
  worth = effective_tokens(tokens, unique)
  assert worth <= tokens * (1 + 1e-9)
  assert effective_tokens(1.1 * tokens, unique) > worth
  assert tokens_worth(worth, unique) == pytest.approx(tokens, rel=1e-6)


def test_no_number_of_epochs_is_worth_more_than_the_limit():
  assert tokens_worth((1.01 + REPETITION_DECAY) * 1e9, 1e9) == math.inf
  assert tokens_worth((0.99 + REPETITION_DECAY) * 1e9, 1e9) < math.inf


def test_three_ways_to_say_one_budget():
  cfg = tiny_config(MOE)
  by_tokens = budget(cfg, tokens=1e9, tokens_per_sec=5e4)
  here = by_tokens["budget"]
  faster = budget(cfg, tokens=1e9, tokens_per_sec=1e5)
  assert faster["optimal"] == by_tokens["optimal"]  # by whatever machine
  assert faster["budget"]["loss"] == here["loss"]
  assert here["gpu_hours"] == pytest.approx(1e9 / 5e4 / 3600)
  for name in ("flops", "gpu_hours"):
    other = budget(cfg, **{name: here[name]}, tokens_per_sec=5e4)["budget"]
    assert other.pop("given_as") == name
    for field, value in other.items():
      assert value == pytest.approx(here[field]), field


def test_without_a_budget_it_is_the_configs_own():
  here = budget(tiny_config(VOCABULARY))["budget"]
  assert (here["tokens"], here["steps"]) == (20 * 8 * 16, 20)
  assert here["gpu_hours"] is here["epochs"] is None
  of_flops = budget(tiny_config(VOCABULARY | {"length": "flops", "train_flops": 1e15}))["budget"]
  assert of_flops["flops"] == pytest.approx(1e15)


def test_experts_count_by_those_at_work_and_depths_by_the_tokens_that_go_through():
  dense, moe, mod = (budget(tiny_config(c), flops=1e15) for c in (VOCABULARY, MOE, MOD))
  layers, expert = 2, 3 * 32 * 64
  router = 32 * 8
  assert moe["model"]["parameters"] - dense["model"]["parameters"] == layers * (7 * expert + router)
  at_work = layers * (expert + router)  # two of eight, where the dense model has one
  wider = moe["model"]["law_parameters"] - dense["model"]["law_parameters"]
  assert wider == at_work
  assert mod["model"]["law_parameters"] < dense["model"]["law_parameters"]
  tokens = [plan["budget"]["tokens"] for plan in (moe, dense, mod)]
  assert tokens == sorted(tokens)
  # The embedding table is looked up, not multiplied with.
  assert dense["model"]["active"] - dense["model"]["law_parameters"] == 384 * 32
  tied = budget(tiny_config(VOCABULARY | {"model.tie_embeddings": True}))["model"]
  assert tied["law_parameters"] == tied["active"] == dense["model"]["law_parameters"]
  for plan, word in ((moe, "Experts"), (mod, "skip")):
    assert any(word in note for note in plan["notes"])
  assert not any("Experts" in n or "skip" in n for n in dense["notes"])


def test_coverage_epochs_and_efficiency_agree_with_each_other():
  cfg = tiny_config(VOCABULARY)
  wanted = budget(cfg)["optimal"]["tokens"]
  at_best = budget(cfg, tokens=wanted)["optimal"]
  assert at_best["coverage"] == pytest.approx(1.0)
  assert at_best["compute_efficiency"] == pytest.approx(1.0)
  repeated = budget(cfg, tokens=wanted, unique_tokens=wanted / 5)
  assert repeated["optimal"]["coverage"] < 1
  assert repeated["optimal"]["compute_efficiency"] < 1
  epochs = repeated["optimal"]["epochs"]
  assert epochs > 5
  enough = budget(cfg, tokens=epochs * wanted / 5, unique_tokens=wanted / 5)["optimal"]
  assert enough["coverage"] == pytest.approx(1.0)
  losses = [row["loss"] for row in repeated["curve"]]
  assert losses == sorted(losses, reverse=True)
  assert budget(cfg, tokens=wanted, law=LAWS["hoffmann"])["optimal"]["coverage"] != 1.0


def test_what_is_said_of_the_data():
  cfg = tiny_config(VOCABULARY)
  wanted = budget(cfg)["optimal"]["tokens"]

  def notes(share, unique=None):
    return budget(cfg, tokens=share * wanted, unique_tokens=unique)["notes"]

  assert not notes(1)
  assert "short for this size" in notes(1 / 3)[0] and "used a lot" in notes(3)[0]
  assert "never worth" in notes(1, wanted / 20)[0]
  of_epochs = lambda n: [note for note in notes(1, wanted / n) if "epochs:" in note]
  assert not of_epochs(3)
  for epochs, note in ((6, "worth visibly less"), (12, "weight decay"), (17, "overfit")):
    assert note in of_epochs(epochs)[0]


def test_the_text():
  plan = budget(tiny_config(MOE), tokens=2e7, unique_tokens=5e6, tokens_per_sec=1e4)
  text = render_budget(plan)
  assert "budget, by tokens: 20.0M tokens, 156,250 steps of 128" in text
  assert "epochs: 4.00, worth 18.6M fresh tokens" in text
  assert text.count("this budget") == 1
  assert max(map(len, text.splitlines())) <= 160
  assert "GPU-hours" not in render_budget(budget(tiny_config(VOCABULARY))).split("\n\n")[0]


DEBUG = "--config=configs/debug.py"


def test_what_is_wrong_is_said():
  for flags, message in (
    (("budget", DEBUG, "--tokens=1e9", "--flops=1e18"), r"--tokens and --flops are several"),
    (("budget", DEBUG, "--gpu_hours=5"), r"--gpu_hours=5 needs --tokens_per_sec"),
    (("budget", DEBUG, "--tokens=-1"), r"--tokens=-1.0: expected a positive number"),
    (("budget", DEBUG, "--unique_tokens=nan"), r"--unique_tokens=nan is not a finite number"),
    (("budget", DEBUG, "--law=kaplan"), r"--law=kaplan: expected besiroglu or hoffmann"),
    (("budget", DEBUG, "--law=1,2,3,4,-5"), r"five positive numbers"),
    (
      ("budget", DEBUG, "--devices=2"),
      r"--devices: there is no such flag. ats-jax plan budget --help",
    ),
    ((DEBUG, "--tokens=1e9"), r"--tokens: there is no such flag"),
    (("budget", "budget", DEBUG), r"unexpected argument 'budget'"),
  ):
    with pytest.raises(ValueError, match=message):
      printed_by("plan", *flags)


def test_the_command():
  assert parse_law("1.5,400,2000,0.3,0.4") == Law(1.5, 400, 2000, 0.3, 0.4)
  asked = ("budget", DEBUG, "--flops=1e15")
  plan = json.loads(printed_by("plan", *asked, "--json", "--law=hoffmann"))
  assert plan["budget"]["flops"] == pytest.approx(1e15)
  assert plan["curve"][3]["loss"] == plan["budget"]["loss"]
  assert "compute efficiency" in printed_by("plan", *asked)
