"""What each scenario does to a step, and that chance is the seed's alone."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import make_test_mesh, named_leaves, random_rows, tiny_config

from ats_jax.step.program import make_program
from lab.faults.scenarios import EARLIEST, LATEST, SCENARIOS

STEPS = 400
CFG = tiny_config()
ROWS = {k: v[None] for k, v in random_rows(CFG, CFG.data.batch_size).items()}
EARLY = ("length_jump", "low_rate")  # what there is from the start
FOREIGN = {k: v[None] for k, v in random_rows(CFG, CFG.data.batch_size, seed=1).items()}


def draw_of(name, seed=0, **changes):
  draw = SCENARIOS[name].draw(name, seed, STEPS, CFG.model.vocab_size, lambda domain, step: FOREIGN)
  return dataclasses.replace(draw, **changes)


def injections(name, **changes):
  draw = draw_of(name, **changes)
  return draw, [SCENARIOS[name].inject(draw, step, ROWS) for step in range(STEPS)]


def changed(injected):
  """Steps whose rows are not those of the data."""
  different = lambda rows: any((rows[k] != ROWS[k]).any() for k in ROWS)
  return [step for step, now in enumerate(injected) if different(now.rows)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_onset_and_severity_are_drawn_from_the_seed(name):
  draws = [draw_of(name, seed) for seed in range(30)]
  assert [d.onset for d in draws] == [draw_of(name, seed).onset for seed in range(30)]
  assert len({d.onset for d in draws}) > 15
  assert all(EARLIEST * STEPS - 1 <= d.onset < LATEST * STEPS for d in draws)
  assert {d.severity for d in draws} == set(SCENARIOS[name].severities)


@pytest.mark.parametrize("name", [n for n in SCENARIOS if n not in EARLY])
def test_nothing_happens_before_the_onset_and_the_data_is_left_alone(name):
  before = {k: v.copy() for k, v in ROWS.items()}
  draw, injected = injections(name)
  for now in injected[: draw.onset]:
    assert now.rows is ROWS and now.rate == now.gradient == 1.0 and now.state is None
  for key, value in ROWS.items():
    np.testing.assert_array_equal(value, before[key])
  for now in injected:
    assert now.rows.keys() == ROWS.keys()
    assert all(now.rows[k].shape == ROWS[k].shape for k in ROWS)
    assert all(now.rows[k].dtype == ROWS[k].dtype for k in ROWS)


def test_rates():
  for name, length in (("rate_burst", 30), ("rate_forever", STEPS), ("rate_jump", STEPS)):
    draw, injected = injections(name)
    hit = [step for step, now in enumerate(injected) if now.rate == draw.severity]
    assert hit == list(range(draw.onset, min(STEPS, draw.onset + length)))


@pytest.mark.parametrize("name", ["noise_burst", "repeats"])
def test_bad_text_is_consistent(name):
  draw, injected = injections(name, severity=7)
  assert changed(injected) == list(range(draw.onset, draw.onset + 7))
  rows = injected[draw.onset].rows
  np.testing.assert_array_equal(rows["tokens"][..., 1:], rows["targets"][..., :-1])
  kinds = len(np.unique(rows["tokens"]))
  assert kinds == 1 if name == "repeats" else kinds > CFG.model.vocab_size / 2


def test_a_share_of_batches_is_noise():
  draw, injected = injections("noise_share", severity=0.1)
  share = len(changed(injected)) / (STEPS - draw.onset)
  assert 0.03 < share < 0.2


def test_shuffled_targets_are_the_same_targets():
  draw, injected = injections("shuffled_targets", severity=5)
  assert changed(injected) == list(range(draw.onset, draw.onset + 5))
  rows = injected[draw.onset].rows
  np.testing.assert_array_equal(rows["tokens"], ROWS["tokens"])
  np.testing.assert_array_equal(np.sort(rows["targets"], axis=None),
                                np.sort(ROWS["targets"], axis=None))  # fmt: skip


def test_stretched_positions():
  draw, injected = injections("stretched", severity=5)
  np.testing.assert_array_equal(injected[draw.onset].rows["positions"], 64 * ROWS["positions"])


def test_gradients():
  draw, injected = injections("nan_gradient", severity=3)
  bad = [step for step, now in enumerate(injected) if np.isnan(now.gradient)]
  assert bad == [draw.onset, draw.onset + 7, draw.onset + 14]
  draw, injected = injections("huge_gradient", severity=1e3)
  assert 1 <= sum(now.gradient == 1e3 for now in injected) < 20


@pytest.fixture(scope="module")
def state():
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    yield make_program(CFG).init()


@pytest.mark.parametrize("name", ["nan_weight", "scaled_matrix", "flipped_bits"])
@pytest.mark.parametrize("seed", range(5))
def test_one_matrix_is_hit_once(state, name, seed):
  draw, injected = injections(name, seed=seed)
  assert [s for s, now in enumerate(injected) if now.state is not None] == [draw.onset]
  edit = injected[draw.onset].state
  old, new = named_leaves(state), named_leaves(edit(state))
  array = lambda x: np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x)
  hit = [k for k in old if not np.array_equal(array(old[k]), array(new[k]))]
  assert len(hit) == 1 and "norm" not in hit[0] and ".model" in hit[0]
  before, after = array(old[hit[0]]), array(new[hit[0]])
  if name == "scaled_matrix":
    np.testing.assert_array_equal(after, before * np.float32(draw.severity))
    return
  places = before.view(np.uint32) != after.view(np.uint32)
  assert places.sum() == draw.severity
  if name == "nan_weight":
    assert np.isnan(after[places]).all()
  else:
    assert (np.abs(after[places]) > 1e30).all() or not np.isfinite(after[places]).all()


MOE = tiny_config({"moe.num_experts": 8, "moe.d_ff": 16, "moe.spare_experts": 1,
                   "moe.router_bias": True})  # fmt: skip


@pytest.fixture
def moe_state():
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    yield make_program(MOE).init()


@pytest.mark.parametrize(
  ("name", "leaves", "count"),
  [
    ("collapsed_router", (".router.offset",), 2),
    ("biased_router", (".router.bias_E",), 2),
    ("dead_experts", (".router.bias_E",), 3),
  ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_experts_of_each_layer_are_hit_once(moe_state, name, leaves, count, seed):
  draw, injected = injections(name, seed=seed, severity=3.0)
  assert [s for s, now in enumerate(injected) if now.state is not None] == [draw.onset]
  router = moe_state.model.segments[0].layers[0].mlp.router
  is_open = np.asarray(router.is_open())[0] > 0
  moments = jax.tree.leaves(moe_state.opt_state)
  old = {k: np.asarray(v) for k, v in named_leaves(moe_state.model).items()}
  state = injected[draw.onset].state(moe_state)
  hit = {k: np.asarray(v) - old[k] for k, v in named_leaves(state.model).items()
         if not np.array_equal(v, old[k])}  # fmt: skip
  assert len(hit) == 1 and all(part in key for part, key in zip(leaves, hit, strict=True))
  (change,) = hit.values()
  assert set(np.unique(change)) == {0.0, -1e3 if name == "dead_experts" else 3.0}
  chosen = change[0] != 0
  assert chosen.sum() == count and (change == change[:1]).all() and not (chosen & ~is_open).any()
  for before, after in zip(moments, jax.tree.leaves(state.opt_state), strict=True):
    assert before.shape == after.shape and before.sharding == after.sharding


def test_dead_experts_have_no_moments(moe_state):
  ones = jax.tree.map(lambda x: x * 0 + 1, moe_state.opt_state)
  moe_state = dataclasses.replace(moe_state, opt_state=ones)
  draw, injected = injections("dead_experts", severity=1.0)
  state = injected[draw.onset].state(moe_state)
  (dead,) = np.flatnonzero(np.asarray(state.model.segments[0].layers[0].mlp.router.bias_E)[0])
  for key, value in named_leaves(state.opt_state).items():
    if value.ndim:
      zeros = np.argwhere(np.asarray(value) == 0)
      expected = any(f".mlp.{name}" in key for name in ("gate", "up", "down"))
      assert bool(len(zeros)) == expected, key
      assert not expected or set(zeros[:, 1]) == {dead}


def test_a_rate_is_low_from_the_start():
  draw, injected = injections("low_rate")
  assert {now.rate for now in injected} == {draw.severity} and draw.severity < 0.2


def test_controls():
  draw, injected = injections("domain_switch", severity=0.5)
  rows = injected[draw.onset].rows
  for key in rows:
    np.testing.assert_array_equal(rows[key][:, :4], FOREIGN[key][:, :4])
    np.testing.assert_array_equal(rows[key][:, 4:], ROWS[key][:, 4:])
  draw, injected = injections("small_batch", severity=2)
  mask = injected[draw.onset].rows["loss_mask"]
  np.testing.assert_array_equal(mask[:, :2], ROWS["loss_mask"][:, :2])
  assert (mask[:, 2:] == 0.0).all()
  draw, injected = injections("length_jump", severity=4)
  assert injected[draw.onset].rows is ROWS
  rows = injected[0].rows
  assert rows["positions"][0, 0, :6].tolist() == [0, 1, 2, 3, 0, 1]
  assert rows["segment_ids"][0, 0, :6].tolist() == [1, 1, 1, 1, 2, 2]
  assert changed(injections("clean")[1]) == []
