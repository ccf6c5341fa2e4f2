"""Which tensor moved farther than it usually does, between two looks."""

import json

import canonical
import jax.numpy as jnp
import numpy as np
from fed import Run, computed_wrongly

from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.setting import Table
from ats_jax.orchestrator.constants import CHANGE_TIMES, USUAL_LOOKS
from ats_jax.orchestrator.signals.changes import SUMS, Changes
from ats_jax.orchestrator.signals.health import moved

EVERY = 8


def walking(changes, rng, steps, looks):
  """Looks at tensors that move by `steps` in random directions; the last answer."""
  for _ in range(looks):
    changes.at = changes.at + rng.normal(size=(SUMS, 4)) * steps
    found = changes.times_usual(jnp.asarray(changes.at))
  return found


def test_a_tensor_is_compared_with_its_own_past_and_with_the_others():
  changes, rng, usual = Changes(), np.random.default_rng(0), np.array([1.0, 1e-3, 0.0, 0.1])
  changes.at = np.zeros((SUMS, 4))
  assert (walking(changes, rng, usual, USUAL_LOOKS + 1) == 1.0).all()  # nothing is usual yet
  found = walking(changes, rng, usual, 2)
  assert (found[:2] < 2.0).all() and found[2] == 1.0
  found = walking(changes, rng, usual * [1.0, 20.0, 1.0, 1.0], 1)
  assert found[1] > CHANGE_TIMES > found[0]
  (cause,) = moved(found.tolist(), ["embed", "head", "frozen", "norm"])
  assert cause.says.startswith("head moved ")
  found = walking(changes, rng, usual * [1.0, 1.0, 1.0, 0.0], 1)
  (cause,) = moved(found.tolist(), ["embed", "head", "frozen", "norm"])
  assert cause.says == "norm did not move since the last look"
  (cause,) = moved(walking(changes, rng, 0.0 * usual, 1).tolist(), list("abcd"))
  assert cause.says.startswith("a, b, d did not move")
  assert (walking(changes, rng, 20.0 * usual, 1) < CHANGE_TIMES).all()  # the rate rose
  changes.forget()
  assert (walking(changes, rng, 1e6 * usual, 1) == 1.0).all()


def test_what_is_usual_survives_a_checkpoint():
  changes, rng = Changes(), np.random.default_rng(0)
  changes.at = np.zeros((SUMS, 4))
  walking(changes, rng, np.ones(4), USUAL_LOOKS + 2)
  again = Changes()
  again.restore(json.loads(json.dumps(changes.to_json())))
  now = jnp.asarray(changes.at + 1.0)
  np.testing.assert_array_equal(again.times_usual(now), changes.times_usual(now))
  assert again.to_json() == changes.to_json()
  new = Changes()
  new.restore(Changes().to_json())
  assert (new.times_usual(now) == 1.0).all()


def test_it_is_a_cause_of_health_with_the_tensors_name(mesh, tmp_path):
  cfg = canonical.config("dense", canonical.SUPERVISED | {"optimizer.warmup_steps": 8})
  run = Run(canonical.program(cfg), tmp_path / "decisions.jsonl", cfg=cfg, loop=None)
  run(EVERY * 12)
  one = lambda state: computed_wrongly(state, "final_norm", 1.2)
  run(1, happen=one)(EVERY * 2 - 1)
  run.end()
  (row,) = (r for r in run.lines("check") if "change of a tensor" in r["health"]["names"])
  assert any("final_norm/scale moved" in cause for cause in row["health"]["causes"])
  assert row["reading"]["looked"]["orchestrator/tensor_change"] > CHANGE_TIMES


def test_what_a_phase_keeps_is_no_cause(mesh, tmp_path):
  text = Table(a=1)
  phases = (Phase(text, steps=EVERY * 9 + 3), Phase(text, trains=("head",)))
  changes = {"data.sources": {"a": ("a.txt",)}, "data.phases": phases}
  cfg = canonical.config("dense", canonical.SUPERVISED | changes)
  run = Run(canonical.program(cfg), tmp_path / "decisions.jsonl", cfg=cfg, loop=None)
  run(EVERY * 12).end()
  rows = run.lines("check")
  assert rows and not [row for row in rows if "change of a tensor" in row["health"]["names"]]
