"""What becomes of a run when a guard of the host decides something."""

import dataclasses

import canonical
import jax
import jax.numpy as jnp
import pytest

from ats_jax.step.state import StepMetrics
from lab.faults.keepers import Log, keeper


class Told:
  """A guard that decides what it was told to, by step."""

  def __init__(self, told):
    self.told, self.step, self.probes = told, 0, []

  def observe(self, step, metrics, probe):
    self.step = step
    self.probes += [] if probe is None else [(step, probe)]

  def decide(self):
    return self.told.get(self.step, "continue")


def train(told, steps, broken=(), saved=None, first=0):
  """The marks that states have after each step, the log, and the keeper at the end."""
  log = Log([], [], [], [], [], [])
  with jax.set_mesh(canonical.mesh()):
    state = canonical.state(canonical.config("dense"))
    mark = lambda state, step: dataclasses.replace(
      state, key=jax.random.key(step), step=jnp.int32(step)
    )
    number = lambda state: int(jax.random.key_data(state.key)[-1])

    def again(state):
      made = mark(state, 1000 + int(state.step))
      return dataclasses.replace(made, step=state.step + 1), None

    watching = keeper(log, lambda: Told(told), lambda state: float(number(state)), again)
    state = mark(state, first)
    watching.start(first, state, saved)
    marks, rates = [], []
    for step in range(first + 1, first + steps + 1):
      watching.before(state)
      rates.append(watching.rate)
      norm = jnp.float32(jnp.nan if step in broken else 1.0)
      state = watching.after(step, mark(state, step), StepMetrics.of({"train/param_norm": norm}))
      assert int(state.step) == step  # batches are lost
      marks.append(number(state))
  return marks, rates, log, watching


@pytest.mark.thorough
def test_what_a_guard_decides_is_done():
  told = {3: "skip", 5: "repeat", 15: ("rate", 0.5), 16: ("rate", 0.5), 20: ("rate", 1.0),
          35: "rollback", 44: ("rollback", 1), 58: ("rollback", 100)}  # fmt: skip
  marks, rates, log, watching = train(told, 60, broken={40})
  assert marks[2] == 2 and marks[3] == 4
  assert marks[4:6] == [1004, 6]  # from the state after step 4
  assert [i for i, out in enumerate(log.left_out, 1) if out] == [3]
  assert [i for i, rate in enumerate(rates, 1) if rate == 0.5] == [16, 17, 18, 19, 20]
  # The newest that is at least 20 old; of 40 there is none; the oldest.
  assert (marks[34], marks[43], marks[57]) == (10, 10, 0)
  assert log.actions == [(15, "rate", 0.5), (20, "rate", 1.0), (35, "rollback", 10),
                         (44, "rollback", 10), (58, "rollback", 0)]  # fmt: skip
  assert watching.saved()[0].probes == [(step, float(step)) for step in range(10, 61, 10)]
  kept = watching.saved()
  marks, _, log, *_ = train({}, 5, saved=kept, first=60)  # the saved guard goes on, not the new one
  assert marks == [61, 62, 63, 64, 65] and not log.actions


@pytest.mark.thorough
def test_a_wrong_decision_is_an_error():
  with pytest.raises(ValueError, match=r"Told\.decide\(\) returned 'stop'"):
    train({2: "stop"}, 3)
