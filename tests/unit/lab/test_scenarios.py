"""What the scenarios of the suite of faults do to a step, and that chance is the seed's alone."""

import math

import canonical
import jax
import numpy as np
import pytest
from helpers import named_leaves, random_rows, tiny_config

from ats_jax.model.param import params_of, trainable
from lab.faults.inject import PLACES, WAYS, Fault, Miscomputed, with_faults
from lab.faults.scenarios import CLASSES, EARLIEST, LATEST, SCENARIOS, SILENT

STEPS = 400
CFG = tiny_config({"model.vocab_size": 300})
ROWS = {k: v[None] for k, v in random_rows(CFG, CFG.data.batch_size).items()}
OTHER = {k: v[None] for k, v in random_rows(CFG, CFG.data.batch_size, seed=1).items()}
# Rows that change before the onset, or by more than values.
EARLY, RESHAPED = ("length_jump",), ("rows_doubled", "accumulation")
OF = {kind: [name for name, s in SCENARIOS.items() if s.kind == kind] for kind in CLASSES}


def injections(name, seed=0):
  draw = SCENARIOS[name].draw(name, seed, STEPS, CFG.model.vocab_size, lambda domain, step: OTHER)
  return draw, [SCENARIOS[name].inject(draw, step, ROWS) for step in range(STEPS)]


def differ(now):
  """Whether the rows of a step are not the data's."""
  return any(now.rows[k].shape != x.shape or (now.rows[k] != x).any() for k, x in ROWS.items())


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario(name):
  """It begins at an onset of its seed, leaves the data's rows alone, and then changes something."""
  before = {k: v.copy() for k, v in ROWS.items()}
  kind, (draw, injected) = SCENARIOS[name], injections(name)
  assert injections(name)[0].onset == draw.onset
  assert draw.onset == kind.begins or EARLIEST * STEPS - 1 <= draw.onset < LATEST * STEPS
  for now in injected[: draw.onset]:
    assert not differ(now) and now.schedule == 1.0 and now.state is None
  for key, value in ROWS.items():
    np.testing.assert_array_equal(value, before[key])
    if name not in RESHAPED:
      assert all(now.rows[key].shape == value.shape for now in injected)
  hit = [s for s, now in enumerate(injected) if differ(now) or now.schedule != 1.0 or now.state]
  assert bool(hit or kind.computes or kind.settings) == (name != "clean")
  assert bool(kind.computes) <= (kind.kind == "computation")
  if kind.kind == "state":
    assert hit == [draw.onset]


@pytest.mark.parametrize("name", OF["data"])
def test_bad_rows_begin_at_the_onset_and_are_the_share_that_is_meant(name):
  draw, injected = injections(name)
  bad = np.array([(now.rows["targets"] != ROWS["targets"]).any(axis=(0, 2)) for now in injected])
  lasts = {"garbage_burst": 20, "wrong_targets": 60, "repeated_text": 40}.get(name, math.inf)
  share = {"garbage_rows": 0.1, "same_rows": 0.75}.get(name, 0.25) if lasts == math.inf else 1.0
  assert bad.any(axis=1).nonzero()[0].min() >= draw.onset
  assert not bad[draw.onset + min(lasts, STEPS) :].any()
  # A repeated row is in the batch that it is taken from.
  assert abs(bad[draw.onset : draw.onset + min(lasts, STEPS)].mean() - share) < 0.1


@pytest.fixture(scope="module")
def program():
  """One compiled step for all faults of it."""
  with jax.set_mesh(canonical.mesh()):
    yield with_faults(canonical.program(CFG))


def one_step(program, wrong, old=None, seed=3):
  """The weights after a step, its loss and its gradient's norm."""
  state = canonical.state(CFG)
  old = trainable(state.model) if old is None else old
  fault = Fault(*map(np.float32, Fault()))
  state, metrics = program.train_step(
    canonical.copied(state), canonical.rows(CFG, seed=seed), program.training_rules(1),
    fault, wrong.on_device(), canonical.copied(old),
  )  # fmt: skip
  leaves = {name: np.asarray(x) for name, x in named_leaves(state.model).items()}
  return leaves, float(metrics["train/loss"]), float(metrics["train/grad_norm"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [n for n in OF["computation"] if SCENARIOS[n].computes])
def test_a_fault_of_the_computation_is_there_in_its_window_only(program, name):
  """It changes what a step makes there, and nothing else has another place."""
  kind, (draw, _) = SCENARIOS[name], injections(name)
  params = params_of(trainable(canonical.state(CFG).model))
  found = [kind.computes(draw, step, params) for step in range(STEPS)]
  steps = [step for step, wrong in enumerate(found) if wrong is not None]
  assert steps[0] == draw.onset and len({found[step] for step in steps}) <= 2  # NaN is not itself
  last = min(STEPS, draw.onset + (STEPS if name in ("head_diverges", *SILENT) else 100))
  assert steps[-1] < last
  clean, loss, norm = one_step(program, Miscomputed())
  wrong = found[draw.onset]
  place, old = PLACES[wrong.place], None
  if WAYS[wrong.way] == "old":
    old = jax.tree.map(lambda x: x * 1.5, trainable(canonical.state(CFG).model))
  hit, hit_loss, hit_norm = one_step(program, wrong, old)
  changed = [n for n in clean if not np.array_equal(clean[n], hit[n], equal_nan=True)]
  assert changed
  assert (hit_loss != loss) == (place in ("weights", "activations"))
  if place == "updates":
    assert (len(changed) == 1 or name == "lost_updates") and hit_norm == norm


def test_what_is_computed_wrongly_is_the_part_that_is_meant():
  with jax.set_mesh(canonical.mesh()):
    tree = {"a": np.arange(8, dtype=np.float32).reshape(2, 4), "b": np.full(8, 2, np.float32)}
    tree = jax.tree.map(jax.numpy.asarray, tree)
    of = lambda way, amount, first=0.25, last=0.5: jax.tree.map(
      np.asarray,
      Miscomputed(3, WAYS.index(way), first, last, amount).on_device().of("gradients", tree),
    )
    scaled = of("scale", -1.0)
    np.testing.assert_array_equal(scaled["a"], [[0, 1, 2, 3], [-4, -5, -6, -7]])
    np.testing.assert_array_equal(scaled["b"], 2.0)
    np.testing.assert_array_equal(of("shift", 1)["a"], [[0, 1, 2, 3], [7, 4, 5, 6]])
    flipped = of("flip", 31, last=0.25)
    np.testing.assert_array_equal(flipped["a"], [[0, 1, 2, 3], [-4, 5, 6, 7]])
    assert np.isnan(of("scale", np.nan, 0.5, 0.75)["b"]).sum() == 4
    elsewhere = Miscomputed(3).on_device().of("updates", tree)
    np.testing.assert_array_equal(np.asarray(elsewhere["a"]), np.asarray(tree["a"]))


@pytest.mark.thorough
def test_what_a_fault_of_the_state_changes(program):
  array = lambda x: np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x)
  of = lambda state: {k: array(v) for k, v in named_leaves(state).items()}
  with jax.set_mesh(canonical.mesh()):
    state = canonical.state(CFG)
    rows, rules = canonical.rows(CFG), program.training_rules(1)
    state, _ = program.train_step(state, rows, rules)
    before = of(state)
    for name in OF["state"]:
      draw, injected = injections(name)
      after = of(injected[draw.onset].state(canonical.copied(state)))
      changed = [k for k in before if not np.array_equal(before[k], after[k], equal_nan=True)]
      assert len(changed) == 1 if name != "lost_moments" else len(changed) > 5, (name, changed)
