"""The reflex: silent on healthy runs, bit for bit; and what it does about each kind of fault."""

import dataclasses
import functools

import canonical
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, counting_rows, micro_batches

from ats_jax.model.param import trainable
from ats_jax.step import tensors
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.optimizers.base import decay_rates
from ats_jax.step.reflex import CLIP_SIGMAS, Tracker
from ats_jax.step.schedule import learning_rate
from lab.faults.inject import Fault, with_faults

FLOOR = 0.1


@jax.jit
def observe(tracker, x):
  return tracker.add(x, FLOOR, memory=0.98, reach=CLIP_SIGMAS), tracker.z(x, FLOOR)


def tracked(values):
  tracker = Tracker.new()
  for x in values:
    tracker, _ = observe(tracker, jnp.float32(x))
  return tracker


@hypothesis.settings(max_examples=25)
@hypothesis.given(
  st.lists(
    st.one_of(st.floats(-10, 10, width=32), st.sampled_from([np.nan, np.inf, -np.inf])),
    min_size=1,
    max_size=60,
  )
)
def test_what_is_not_finite_never_enters(values):
  finite = [x for x in values if np.isfinite(x)]
  tracker, clean = tracked(values), tracked(finite)
  assert_trees_equal(tracker, clean)
  assert np.isfinite(jax.tree.leaves(tracker)).all()


def test_a_tracker_finds_mean_and_spread_and_follows_what_becomes_usual():
  tracker = tracked(np.random.default_rng(0).normal(3.0, 0.1, 400))
  # The weight of the last fifty: the mean's own std is 0.01, that of the std about as much.
  assert abs(float(tracker.mean) - 3.0) < 0.04 and abs(float(tracker.std(0.0)) - 0.1) < 0.03
  hit, z = observe(tracker, jnp.float32(1e6))
  assert z > 1e5  # one outlier moves the mean by a share of its reach at most
  assert abs(float(hit.mean - tracker.mean)) <= CLIP_SIGMAS * float(tracker.std(FLOOR)) * 0.021
  level = tracker  # a new level is learned although every sample was an outlier
  for _ in range(100):
    level, _ = observe(level, jnp.float32(5.0))
  assert abs(float(level.mean) - 5.0) < 0.5
  # One of ten samples is 20 sigmas off: after some hundreds it is no surprise.
  _, first = observe(tracker, jnp.float32(5.0))
  for i in range(400):
    tracker, _ = observe(tracker, jnp.float32(5.0 if i % 10 == 0 else 3.0))
  _, last = observe(tracker, jnp.float32(5.0))
  assert float(first) > 15.0 and float(last) < 6.0


def test_a_steep_start_does_not_widen_it_for_long():
  steps, rng = np.arange(1, 121), np.random.default_rng(0)
  noise = 0.15
  losses = 2.0 + 3.5 * np.minimum(1.0, 12.0 / steps) + rng.normal(0.0, noise, steps.size)
  tracker = tracked(losses)
  assert float(tracker.std(0.0)) < 2.0 * noise
  assert float(tracker.z(jnp.float32(losses[-1] + 2.0), 0.0)) > 6.0


# ---- in the step

# Without the clipping of gradients, which would do what the reflex is to do, and where the rate
# stays near its highest.
SETTINGS = {"num_steps": 2000, "optimizer.warmup_steps": 10, "optimizer.grad_clip": 0.0}
HEALTHY = 80  # steps before something happens


@functools.cache
def program_of(mode, platform):
  cfg = canonical.config("dense", SETTINGS | {"orchestrator.mode": mode})
  optimizer = build_optimizer(cfg, platform)
  return with_faults(dataclasses.replace(canonical.program(cfg), optimizer=optimizer))


@functools.cache
def begun(mode, steps, platform):
  """A run of so many steps to which nothing happened."""
  run = Run(mode, 0, platform)
  run(steps)
  return run.state, run.rows


class Run:
  """A tiny model under a mode, after some healthy steps."""

  def __init__(self, mode, steps, platform="cpu"):
    self.program, self.step, self.rows = program_of(mode, platform), steps, []
    if steps:
      state, rows = begun(mode, steps, platform)
      self.state, self.rows = canonical.copied(state), list(rows)
    else:
      self.state = canonical.state(self.program.cfg)

  def __call__(self, steps=1, *, noise=False, **fault):
    given = Fault(*(jnp.float32(fault.get(name, 1.0)) for name in Fault._fields))
    for _ in range(steps):
      batch = micro_batches(counting_rows(self.step, noise=noise), 1)
      self.state, metrics = self.program.train_step(
        self.state, batch, self.program.training_rules(1), fault=given
      )
      self.step += 1
      self.rows.append(metrics.on_host())
    return self.rows[-1]

  def control(self, **values):
    """Set scalars as the supervisor does."""
    arrays = {name: jnp.float32(value) for name, value in values.items()}
    control = self.state.control._replace(**arrays)
    self.state = dataclasses.replace(self.state, control=control)

  @property
  def weights(self):
    return jax.tree.map(np.asarray, (self.state.model, self.state.opt_state))


@pytest.mark.thorough
def test_a_healthy_run_and_one_that_is_observed_are_the_same_bit_for_bit(mesh):
  runs = {mode: Run(mode, HEALTHY) for mode in ("off", "act", "observe")}
  for row in runs["act"].rows:
    assert row["reflex/skipped"] == 0.0
    assert row["reflex/grad_scale"] == row["reflex/rate_scale"] == 1.0
  assert_trees_equal(runs["act"].weights, runs["off"].weights)
  for run in (runs["off"], runs["observe"]):  # whatever happens
    run(noise=True)
    run(gradient=100.0)
    run(3)
  assert_trees_equal(runs["off"].weights, runs["observe"].weights)
  assert max(row["reflex/z_loss"] for row in runs["observe"].rows) > 6.0


def test_the_learning_rate_that_is_reported_is_the_one_that_was_applied(mesh):
  """With what the supervisor set, and with what the reflex held."""
  run = Run("act", HEALTHY)
  programs = run.program.train_step._cache_size()
  calm, burst = run(), run(schedule=1e3)
  run.control(lr_scale=0.25)
  cut, left_out = run(), run(gradient=np.nan)
  assert burst["reflex/rate_scale"] < 0.01
  # Of an update that is left out, the rate is the one it would have been made with.
  assert left_out["reflex/skipped"] == 1.0 and cut["reflex/rate_scale"] == 1.0
  for row, factor in (
    (calm, 1.0),
    (burst, burst["reflex/rate_scale"]),
    (cut, 0.25),
    (left_out, 0.25),
  ):
    want = factor * row["train/scheduled_rate"]
    np.testing.assert_allclose(row["train/learning_rate"], want, rtol=1e-5)
  scheduled = learning_rate(run.program.cfg, np.array([HEALTHY, HEALTHY + 1]))
  found = [calm["train/scheduled_rate"], burst["train/scheduled_rate"]]
  np.testing.assert_allclose(found, scheduled * np.array([1.0, 1e3]), rtol=1e-6)
  assert 0.15 < cut["train/update_norm"] / calm["train/update_norm"] < 0.35
  assert run.program.train_step._cache_size() == programs


def test_a_gradient_that_is_not_finite_is_left_out(mesh):
  run = Run("act", 0)
  run(5)
  before, grads = run.weights, jax.tree.map(np.asarray, run.state.reflex.grads)
  row = run(gradient=np.nan)
  assert row["reflex/skipped"] == row["reflex/broken"] == 1.0
  assert_trees_equal(run.weights, before)
  assert_trees_equal(run.state.reflex.grads, grads)
  assert int(run.state.step) == 6  # its data is consumed, the schedule goes on
  assert run()["reflex/broken"] == 0.0


def test_what_surprises_is_trained_on(mesh):
  run = Run("act", HEALTHY)
  before, row = run.weights, run(noise=True)
  assert row["reflex/z_loss"] > 6.0 and not row["reflex/skipped"]
  pairs = zip(*map(jax.tree.leaves, (before, run.weights)), strict=True)
  assert not all(np.array_equal(*pair) for pair in pairs)


def test_a_gradient_far_too_large_is_shrunk_tensor_by_tensor(mesh):
  run = Run("act", HEALTHY)
  calm = run.rows[-1]
  row = run(gradient=1e6)
  assert calm["reflex/grad_scale"] == 1.0 and row["reflex/grad_scale"] < 1e-3
  assert row["train/update_norm"] < 20.0 * calm["train/update_norm"]
  assert np.isfinite(jax.tree.leaves(run.weights)[0]).all()


def test_a_rate_thirty_times_too_large_is_held_though_the_schedule_asks_for_it(mesh):
  run = Run("act", HEALTHY)
  typical = run.rows[-1]["train/update_norm"]
  rows = [run(schedule=30.0) for _ in range(10)]
  assert rows[0]["train/update_norm"] < 2.0 * typical
  assert rows[-1]["reflex/held"] == 10.0
  assert run()["reflex/held"] == 0.0


def test_a_rise_that_the_config_declares_is_not_held(mesh):
  phase = lambda rate, **length: {"weights": {"a": 1.0}, "learning_rate": rate, **length}
  phases = {
    "data.sources": {"a": ("a.txt",)},
    "data.phases": (phase(1e-3, steps=HEALTHY), phase(1e-2)),
  }
  watched = {"orchestrator.mode": "act", "optimizer.schedule": "constant"}
  cfg = canonical.config("dense", {"num_steps": 2000} | watched | phases)
  program, state = canonical.program(cfg), canonical.state(cfg)
  for step in range(HEALTHY + 5):
    batch = micro_batches(counting_rows(step), 1)
    state, metrics = program.train_step(state, batch, program.training_rules(1))
    row = metrics.on_host()
    assert (row["reflex/rate_scale"], row["reflex/held"]) == (1.0, 0.0)
    assert row["train/learning_rate"] == pytest.approx(1e-3 if step < HEALTHY else 1e-2)


def test_weight_decay_is_multiplied_and_only_where_there_is_any(mesh):
  def moved(scale):
    run = Run("act", HEALTHY)
    run.control(decay_scale=scale)
    row = run()
    return row["train/learning_rate"], *run.weights

  rates, models, moments = zip(*map(moved, (0.0, 1.0, 3.0)), strict=True)
  before = Run("act", HEALTHY).weights[0]
  cfg = Run("act", 0).program.cfg
  decay, decays = cfg.optimizer.weight_decay, jax.tree.leaves(decay_rates(cfg, before))
  for decayed, old, never, once, thrice in zip(
    decays, *map(jax.tree.leaves, (before, *models)), strict=True
  ):
    off = rates[0] * decay * old if decayed else np.zeros_like(old)
    np.testing.assert_allclose(never - once, off, rtol=1e-3, atol=3e-7)
    np.testing.assert_allclose(once - thrice, 2 * off, rtol=1e-3, atol=3e-7)
  assert_trees_equal(moments[0], moments[2])


def edit(tree, name, change):
  """`tree` with the first element of the array of that name changed."""

  def one(path, x):
    if name not in jax.tree_util.keystr(path):
      return x
    array = np.array(x)
    array.reshape(-1)[:1] = change(array.reshape(-1)[:1])
    return jax.device_put(array, x.sharding)

  return jax.tree_util.tree_map_with_path(one, tree)


def flip(bit):
  """One bit of the element, whatever number that gives."""
  return lambda x: (x.view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)


def tensor(run, row):
  return tensors.names(run.program.cfg, trainable(run.state.model))[int(row["reflex/wrong_tensor"])]


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_a_bit_of_a_weight_that_flips_between_two_steps_is_found(mesh, bit):
  run = Run("act", HEALTHY)
  assert run.rows[-1]["reflex/wrong"] == 0.0
  model = edit(run.state.model, "head", flip(bit))
  run.state = dataclasses.replace(run.state, model=model)
  row = run()
  assert row["reflex/wrong"] == 1.0 and "head" in tensor(run, row)
  assert run()["reflex/wrong"] == 0.0


@pytest.mark.parametrize(
  ("name", "change"),
  [
    (".mu.head", lambda x: 1e30),
    (".nu.head", lambda x: -1.0),
    (".nu.head", lambda x: np.inf),
  ],
)
def test_moments_that_no_gradients_can_have_led_to_begin_anew(mesh, name, change):
  run, calm = Run("act", HEALTHY), Run("act", HEALTHY)
  run.state = dataclasses.replace(run.state, opt_state=edit(run.state.opt_state, name, change))
  row = run()
  assert row["reflex/wrong"] == 1.0 and "head" in tensor(run, row)
  run(10)
  calm(11)
  assert sum(row["reflex/wrong"] for row in run.rows) == 1.0
  np.testing.assert_allclose(run.rows[-1]["train/loss"], calm.rows[-1]["train/loss"], rtol=0.01)


def test_a_count_of_updates_that_is_off_is_mended_before_it_is_used(mesh):
  run, calm = Run("act", HEALTHY), Run("act", HEALTHY)
  count = lambda path, x: -x if jax.tree_util.keystr(path).endswith(".steps") else x
  opt_state = jax.tree_util.tree_map_with_path(count, run.state.opt_state)
  run.state = dataclasses.replace(run.state, opt_state=opt_state)
  assert run()["reflex/miscounted"] == 2 * HEALTHY
  calm()
  assert_trees_equal(run.weights, calm.weights)


@pytest.mark.thorough
def test_the_passes_of_a_gpu_come_to_the_same(mesh):
  """Nothing is kept apart there that a CPU keeps apart; here too, by pretending."""

  def steps(platform):
    run = Run("act", HEALTHY, platform=platform)
    run(gradient=1e6)
    run(2, schedule=10.0)
    return run

  want, got = steps("cpu"), steps("gpu")
  for a, b in zip(got.rows, want.rows, strict=True):
    np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=2e-3, atol=2e-3)
  for a, b in zip(jax.tree.leaves(got.weights), jax.tree.leaves(want.weights), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
  assert want.rows[-1]["reflex/rate_scale"] < 1.0
