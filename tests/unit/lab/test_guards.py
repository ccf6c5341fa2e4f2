"""The guards of the suite of faults on series made by hand, and the example of its page."""

import copy
import math
import re
from pathlib import Path

import pytest

from lab.faults import guards

PAGE = Path(__file__).parents[3] / "docs" / "lab" / "faults.md"
NAN, INF = math.nan, math.inf


def decisions(guard, losses, norms=None, start=1, weights=1.0):
  """What it decides on each step of a series."""
  made = []
  for step, loss in enumerate(losses, start):
    norm = 1.0 if norms is None else norms[step - start]
    metrics = {"train/loss": loss, "train/grad_norm": norm, "train/param_norm": weights}
    guard.observe(step, metrics, None)
    made.append(guard.decide())
  return made


def wave(count, level=2.0, size=0.01):
  """A calm series: up and down around a level."""
  return [level + size * (-1) ** i for i in range(count)]


def after_calm(kind, count=70, **series):
  """A guard that has seen a calm series, in which it did nothing; and the next step."""
  guard = kind()
  assert set(decisions(guard, wave(count, **series))) <= {"continue", ("rate", 1.0)}
  return guard, count + 1


ALL = (
  guards.SkipStep,
  guards.RepeatStep,
  guards.Rewind,
  guards.EmaRollback,
  guards.ZscoreLadder,
  guards.Restart,
)


@pytest.mark.parametrize("kind", ALL)
def test_a_calm_series_is_left_alone_whatever_its_level(kind):
  after_calm(kind, 400, level=0.1, size=0.001)
  after_calm(kind, 400, level=9.0)


@pytest.mark.parametrize("kind", ALL)
def test_one_that_is_copied_decides_alike_and_on_its_own(kind):
  guard, step = after_calm(kind)
  other = copy.deepcopy(guard)
  odd = [2.0, 9.0, NAN, 2.0, 9.0]
  assert decisions(guard, odd, start=step) == decisions(other, odd, start=step)


@pytest.mark.parametrize(("loss", "norm"), [(2.1, 1.0), (1.9, 1.0), (2.0, 1.1), (2.0, 0.9)])
def test_skip_step_has_two_sides_and_two_series(loss, norm):
  guard = guards.SkipStep()
  decisions(guard, wave(70), wave(70, level=1.0))
  assert decisions(guard, [loss], [norm], start=71) == ["skip"]


def test_skip_step_leaves_out_from_six_sigmas_on_and_from_half_a_window_on():
  guard = guards.SkipStep()
  assert decisions(guard, [*wave(63), 9.0])[-1] == "continue"
  # With n values at -1 and +1 sigma, the unbiased sigma is a little larger.
  sigma = 0.01 * math.sqrt(64 / 63)
  for off, decision in ((5.99, "continue"), (6.01, "skip")):
    guard = guards.SkipStep()
    decisions(guard, wave(64))
    assert decisions(guard, [2.0 + off * sigma], start=65) == [decision]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_skip_step_is_not_poisoned_and_takes_a_step_in_the_end(bad):
  guard, step = after_calm(guards.SkipStep)
  assert decisions(guard, [bad] * 50, start=step) == ["skip"] * 50
  assert decisions(guard, wave(20), start=step + 50) == ["continue"] * 20
  assert decisions(guard, [9.0], start=step + 70) == ["skip"]
  guard, step = after_calm(guards.SkipStep, 128)
  found = decisions(guard, [1e3 * 10**i for i in range(12)], start=step)
  assert found[: guards.LEFT_OUT + 1] == ["skip"] * guards.LEFT_OUT + ["continue"]


def test_repeat_step_makes_again_what_skip_step_leaves_out():
  guard, step = after_calm(guards.RepeatStep)
  assert decisions(guard, [9.0, 2.0, NAN], start=step) == ["repeat", "continue", "repeat"]


GOES_BACK = (guards.Rewind, guards.EmaRollback, guards.ZscoreLadder)


@pytest.mark.parametrize("kind", GOES_BACK)
def test_steps_that_are_not_finite_are_left_out_and_then_the_run_goes_back(kind):
  guard, step = after_calm(kind)
  patience = kind.PATIENCE
  found = decisions(guard, [NAN] * 80, start=step)
  assert found[: patience + 1] == ["skip"] * patience + ["rollback"]
  assert [i for i, x in enumerate(found) if x == "rollback"] == [10, 21, 32]  # for 50 steps no more
  assert set(found[33:]) == {"skip"}
  guard, step = after_calm(kind)
  found = decisions(guard, [NAN, 2.0] * 30, start=step)  # never so many in a row
  assert found.count("skip") == 30 and "rollback" not in found


@pytest.mark.parametrize("kind", GOES_BACK)
def test_weights_that_are_not_finite_are_seen(kind):
  guard, step = after_calm(kind)
  assert decisions(guard, [2.0], start=step, weights=NAN) == ["skip"]


def test_rewind_goes_back_from_a_rise_of_the_median():
  guard, step = after_calm(guards.Rewind, 70)
  assert "rollback" not in decisions(guard, [9.0] * 4 + [2.0] * 6, start=step)  # not the median
  guard, step = after_calm(guards.Rewind, 70)
  assert "rollback" not in decisions(guard, [2.2] * 10, start=step)  # below 0.25 nats
  guard, step = after_calm(guards.Rewind, 70)
  assert decisions(guard, [2.3] * 10, start=step) == ["continue"] * 9 + ["rollback"]
  guard, step = after_calm(guards.Rewind, 70)
  assert "rollback" not in decisions(guard, [1.0] * 10, start=step)  # a fall is welcome


def test_ema_rollback_goes_back_at_three_times_the_average():
  for loss, decision in ((5.9, "continue"), (6.1, "rollback"), (0.1, "continue")):
    guard, step = after_calm(guards.EmaRollback)
    assert decisions(guard, [loss], start=step) == [decision]
  guard, step = after_calm(guards.EmaRollback)
  found = decisions(guard, [7.0] * 20, start=step)
  assert found == ["rollback"] * guards.IN_A_ROW + ["continue"] * 17  # which do not raise it
  later = decisions(guard, [2.0] * guards.CALM + [7.0], start=step + 20)
  assert later == ["continue"] * guards.CALM + ["rollback"]


@pytest.mark.parametrize(
  ("z", "decision"),
  [(2.9, "continue"), (3.1, ("rate", 0.5)), (3.9, ("rate", 0.5)), (4.1, "skip"), (5.9, "skip"),
   (6.1, "rollback"), (-9.0, "continue")],
)  # fmt: skip
def test_the_ladder_by_the_score(z, decision):
  guard, step = after_calm(guards.ZscoreLadder, 50)
  loss = 2.0 + z * 0.01 * math.sqrt(50 / 49)
  assert decisions(guard, [loss], start=step) == [decision]


def test_the_ladder_lowers_the_rate_for_ten_steps():
  guard, step = after_calm(guards.ZscoreLadder, 50)
  found = decisions(guard, [2.035, *wave(15)], start=step)
  assert found == [("rate", 0.5), *["continue"] * 9, ("rate", 1.0), *["continue"] * 5]


def test_restart_goes_to_the_last_checkpoint_three_times():
  guard = guards.Restart()
  assert decisions(guard, [NAN], start=100) == [("rollback", 100)]  # that of 100 is not saved
  assert decisions(guard, [NAN], start=101) == [("rollback", 1)]
  assert decisions(guard, [2.0], start=250) == ["continue"]
  assert decisions(guard, [2.0], start=251, weights=INF) == [("rollback", 51)]
  assert decisions(guard, [NAN] * 3, start=300) == ["continue"] * 3


def test_the_example_of_the_page(tmp_path, monkeypatch):
  (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
  assert len(example.splitlines()) <= 25
  (tmp_path / "my_guards.py").write_text(example, encoding="utf-8")
  monkeypatch.syspath_prepend(str(tmp_path))
  kind = guards.load("my_guards:HighProbe")
  guard = kind()
  metrics = {"train/loss": 2.0, "train/grad_norm": 1.0, "train/param_norm": 1.0}
  found = []
  for step in range(1, 61):
    probe = None if step % 10 else (2.0 if step < 40 else 2.3)
    guard.observe(step, metrics, probe)
    found.append(guard.decide())
  assert [step for step, x in enumerate(found, 1) if x != "continue"] == [40]
  assert found[39] == ("rollback", 30)


@pytest.mark.parametrize("name", ["nowhere_at_all:Guard", "math", "fractions:Fraction"])
def test_what_is_no_guard(name):
  with pytest.raises(ValueError, match=f"--guard={name} is no class with `observe` and `decide`"):
    guards.load(name)
