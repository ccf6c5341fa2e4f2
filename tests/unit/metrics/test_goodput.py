import pytest
from hypothesis import given
from hypothesis import strategies as st

from ats_jax.metrics.goodput import CATEGORIES, Goodput


def test_time_goes_to_the_innermost_category():
  now = [100.0]
  goodput = Goodput(clock=lambda: now[0])
  now[0] += 1
  with goodput.timed("eval"):
    now[0] += 2
    with goodput.timed("compile"):
      now[0] += 4
    now[0] += 8
  now[0] += 16
  summary = goodput.summary()
  secs = {name: summary[f"goodput/{name}_secs"] for name in ("eval", "compile", "other", "wall")}
  assert secs == {"eval": 10, "compile": 4, "other": 17, "wall": 31}
  assert summary["goodput/eval_share"] == 10 / 31 and summary["goodput/step_secs"] == 0
  assert goodput.line() == (
    "31.0s of wall time: other 54.8% (17.0s), eval 32.3% (10.0s), compile 12.9% (4.0s)"
  )


def test_an_exception_ends_its_category_and_passes():
  now = [0.0]
  goodput = Goodput(clock=lambda: now[0])
  with pytest.raises(KeyError), goodput.timed("step"), goodput.timed("data_wait"):
    now[0] = 1.0
    assert goodput.summary()["goodput/data_wait_secs"] == 1.0  # inside it, so far
    raise KeyError
  now[0] = 4.0
  summary = goodput.summary()
  assert summary["goodput/data_wait_secs"] == 1.0 and summary["goodput/other_secs"] == 3.0
  with pytest.raises(ValueError, match="'stpe'; legal are compile, data_wait, step"):
    goodput.timed("stpe")


EVENTS = st.lists(st.one_of(st.sampled_from(CATEGORIES), st.just("end"), st.integers(0, 1000)))


@given(EVENTS)
def test_totals_add_up_to_the_wall_time(events):
  now = [0.0]
  goodput = Goodput(clock=lambda: now[0])
  open_timers = []
  expected = dict.fromkeys((*CATEGORIES, "other"), 0)
  for event in events:
    if isinstance(event, int):
      now[0] += event
      expected[open_timers[-1][0] if open_timers else "other"] += event
    elif event == "end":
      if open_timers:
        open_timers.pop()[1].__exit__(None, None, None)
    else:
      timer = goodput.timed(event)
      timer.__enter__()
      open_timers.append((event, timer))
  summary = goodput.summary()
  assert {name: summary[f"goodput/{name}_secs"] for name in expected} == expected
  assert summary["goodput/wall_secs"] == now[0]
  shares = sum(value for name, value in summary.items() if name.endswith("_share"))
  assert shares == pytest.approx(1.0 if now[0] else 0.0)
