"""The audit's scenarios do what they say, through the doors that production has."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh, random_rows, tiny_config

from ats_jax.orchestrator.actions import SetLearningRateScale
from ats_jax.orchestrator.trials.paired import look_ahead
from ats_jax.step.program import make_program
from lab.faults.arms import build_arm
from lab.faults.audit import AUDITED, PLACES, flipped
from lab.faults.bench import Bench
from lab.faults.domains import DOMAINS, topics
from lab.faults.single import Loop, changed, run
from lab.faults.suite import AUDIT, SUITES

pytestmark = [pytest.mark.thorough, pytest.mark.slow]  # of the laboratory

STEPS = 400
CFG = tiny_config({"data.batch_size": 16})
ROWS = {k: v[None] for k, v in random_rows(CFG, 16).items()}
OTHER = {k: v[None] for k, v in random_rows(CFG, 16, seed=1).items()}


@pytest.fixture(scope="module", autouse=True)
def mesh():
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    yield


def draw_of(name, seed=0, num_steps=STEPS):
  kind = AUDITED[name]
  return kind, kind.draw(name, seed, num_steps, CFG.model.vocab_size, lambda domain, step: OTHER)


def injections(name, seed=0):
  kind, draw = draw_of(name, seed)
  return draw, [kind.inject(draw, step, ROWS) for step in range(STEPS)]


def taken(name, seed):
  """[step, row]: which rows are of the minority."""
  injected = injections(name, seed)[1]
  for now in injected:
    for key, value in now.rows.items():
      np.testing.assert_array_equal(value[0, now.minority], OTHER[key][0, now.minority])
      np.testing.assert_array_equal(value[0, ~now.minority], ROWS[key][0, ~now.minority])
  return np.array([now.minority for now in injected])


@pytest.mark.parametrize("by", ["batch", "row", "shard"])
@pytest.mark.parametrize("share", [1, 3, 10])
@pytest.mark.thorough
def test_a_minority_has_its_share(by, share):
  found = np.array([taken(f"minority_{by}_{share}", seed) for seed in range(8)])
  # Of batches by chance, 32 of 3200 are 1 %, give or take 5.6.
  wide = {"batch": 3.0 * np.sqrt(share / 100 / found[..., 0].size), "row": 0.004, "shard": 0.02}
  assert abs(found.mean() - share / 100) < wide[by]
  whole = found.all(axis=2) | ~found.any(axis=2)
  assert whole.all() == (by != "row")
  if by == "shard":
    starts = np.diff(found[:, :, 0].astype(int), axis=1) == 1
    assert starts.sum() <= 8 * 3 and found[:, :, 0].sum() > starts.sum()


def test_shards_are_fifteen_batches_in_a_row():
  found = taken("minority_shard_25", 3)[:, 0].astype(int)
  edges = np.flatnonzero(np.diff(found, prepend=0, append=0))
  lengths = edges[1::2] - edges[::2]
  assert (lengths[1:-1] == 15).all() and len(lengths) >= 6
  assert (np.diff(edges[::2])[1:] == 60).all()


def test_a_minority_is_no_fault():
  for name, kind in AUDITED.items():
    assert kind.is_control == name.startswith(("minority", "base64", "warm", "rows", "acc", "long"))


@pytest.fixture(scope="module")
def state():
  program = make_program(CFG)
  state = program.init()
  some = lambda x: x + 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else x + 300
  return dataclasses.replace(
    state, opt_state=jax.tree.map(some, state.opt_state), step=state.step + 300
  )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_one_bit_flips(state, place, bit):
  kind, draw = draw_of(f"flip_{place}_b{bit}")
  at = [kind.inject(draw, step, ROWS).state for step in range(STEPS)]
  assert [step for step, edit in enumerate(at) if edit] == [draw.onset]
  after = at[draw.onset](state)
  (name,) = changed(CFG, state, after)
  parts = {"weight": "model/", "mu": "/mu/", "nu": "/nu/", "adam_steps": "/steps", "step": "step"}
  assert parts[place] in name
  if place in ("weight", "mu", "nu"):
    assert "layers/" in name or "embed" in name or "head" in name
    assert "norm" not in name and "segments" not in name
  bits = lambda s: np.concatenate([
    np.asarray(x).reshape(-1).view(np.uint32)
    for x in jax.tree.leaves(dataclasses.replace(s, key=jax.random.key_data(s.key)))
    if np.asarray(x).dtype.itemsize == 4
  ])  # fmt: skip
  different = bits(state) ^ bits(after)
  assert different[different != 0].tolist() == [1 << bit]


def test_places_are_drawn_from_the_seed(state):
  hit = lambda seed: changed(CFG, state, flipped(state, np.random.default_rng(seed), "mu", 3))
  assert len({hit(seed)[0] for seed in range(12)}) > 4
  assert hit(5) == hit(5)


def test_a_wrong_rate_is_the_schedules():
  arm = build_arm("clip", CFG)
  rates = {}
  for name in ("clean", "schedule_x30_from_0"):
    bench = Small(name)
    loop = Loop(bench, arm, name, 0)
    _, metrics = loop.update(0, arm.program.init(), loop.injection(0))
    values = metrics.on_host()
    rates[name] = values["train/scheduled_rate"], values["train/learning_rate"]
  np.testing.assert_allclose(
    np.divide(rates["schedule_x30_from_0"], rates["clean"]), 30.0, rtol=1e-6
  )


class Small:
  """What a loop needs of a bench: rows of numbers."""

  def __init__(self, name):
    self.cfg, self.vocab_size = dataclasses.replace(CFG, num_steps=40), CFG.model.vocab_size

  def rows(self, seed, step):
    return {k: v[None] for k, v in random_rows(CFG, 16, seed=100 * seed + step).items()}

  def other_rows(self, seed, domain, step):
    return OTHER


def test_when_the_rate_is_wrong():
  for name, first, length in (
    ("schedule_x30_forever", None, STEPS),
    ("schedule_x10_burst", None, 30),
    ("schedule_x30_from_0", 0, STEPS),
  ):
    draw, injected = injections(name)
    assert first is None or draw.onset == first
    wrong = [step for step, now in enumerate(injected) if now.schedule != 1.0]
    assert wrong == list(range(draw.onset, min(STEPS, draw.onset + length)))
    assert {injected[step].schedule for step in wrong} == {float(name.split("_")[1][1:])}
    assert all(now.rate == 1.0 and now.rows is ROWS for now in injected)


def test_what_a_user_declares():
  draw, injected = injections("warm_restart")
  factors = np.array([now.schedule for now in injected])
  assert (np.diff(factors[: draw.onset]) < 0).all() and (factors[draw.onset :] == 1.0).all()
  assert factors[draw.onset] / factors[draw.onset - 1] == pytest.approx(5.0, rel=0.01)
  draw, injected = injections("rows_doubled")
  assert injected[draw.onset - 1].rows["tokens"].shape[1] == 16
  assert injected[draw.onset].rows["tokens"].shape[1] == 32
  draw, injected = injections("accumulation")
  for key, value in injected[draw.onset].rows.items():
    assert value.shape[:2] == (2, 8)
    np.testing.assert_array_equal(value.reshape(ROWS[key].shape), ROWS[key])


def test_domains_are_of_other_bytes():
  text = topics()[3]
  count = lambda text: np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
  plain, script = count(text), count(DOMAINS["script"](text))
  assert script[ord("a") : ord("z") + 1].sum() == 0 and script[128:].sum() > 0.6 * script.sum()
  assert plain[128:].sum() < 0.01 * plain.sum()
  assert DOMAINS["script"](text).count(" ") == text.count(" ")
  letters = [DOMAINS["script"](chr(c)) for c in range(ord("a"), ord("z") + 1)]
  assert len(set(letters)) == 26
  encoded = DOMAINS["base64"](text)
  assert {len(line) for line in encoded.splitlines()[:-1]} == {76}


SETTINGS = {"num_steps": 120, "model.num_layers": 1, "model.d_model": 32, "model.d_ff": 64,
            "data.batch_size": 8, "optimizer.warmup_steps": 20}  # fmt: skip


@pytest.fixture(scope="module")
def bench():
  return Bench(dataclasses.replace(AUDIT, settings=tuple(SETTINGS.items()), pause_every=20))


@pytest.fixture(scope="module")
def arm_of(bench):
  """Arms by name, each compiled once."""
  return functools.cache(lambda name: build_arm(name, bench.cfg))


def with_value(metrics, name, value):
  values = metrics.values.at[metrics.names.index(name)].set(value)
  return dataclasses.replace(metrics, values=values)


def test_every_domain_is_scored_and_its_tokens_are_counted(bench, arm_of):
  arm = arm_of("clip")
  record = run(bench, arm, "minority_row_10", 0, arm.program.init())
  assert record["domains"].keys() == record["tokens"].keys() == {"main", "script"}
  assert record["loss"] == record["domains"]["main"] != record["domains"]["script"]
  seen = {name: tokens for name, (tokens, _) in record["tokens"].items()}
  assert sum(seen.values()) == 120 * 8 * 32 and 0.05 < seen["script"] / sum(seen.values()) < 0.15
  assert all(out == 0 for _, out in record["tokens"].values())
  assert record["updates"] == 120 and not record["hit"]


def test_tokens_that_are_left_out_are_counted(bench, arm_of):
  arm = arm_of("skip_step")
  left = {70, 71, 90}

  def step(state, memory, batch, fault):
    state, memory, metrics = arm.step(state, memory, batch, fault)
    skipped = float(int(state.step) - 1 in left)
    return state, memory, with_value(metrics, "rule/skipped", skipped)

  spoilt = dataclasses.replace(arm, step=step)
  record = run(bench, spoilt, "minority_row_10", 0, arm.program.init())
  assert sum(tokens for _, tokens in record["tokens"].values()) == 3 * 8 * 32
  assert record["skipped"] == 3


@pytest.mark.parametrize("name", ["clip", "rewind"])
@pytest.mark.thorough
def test_a_run_that_is_not_finite_goes_on(bench, arm_of, name):
  """Without a guard from its checkpoint, once; `rewind` from a copy of its own."""
  arm = arm_of(name)
  record = run(bench, arm, "flip_weight_b30", 1, arm.program.init())
  clean = run(bench, arm, "clean", 1, arm.program.init())
  assert record["finite"] and record["loss"] < clean["loss"] + 0.5
  assert record["updates"] < clean["updates"] == 120
  assert len(record["stops"]) == (name == "clip") and not clean["stops"]
  assert record["rollbacks"] == (name == "rewind") and not clean["rollbacks"]


def test_a_run_that_stops_again_is_over(bench, arm_of):
  arm = arm_of("clip")

  def step(state, memory, batch, fault):
    state, memory, metrics = arm.step(state, memory, batch, fault)
    bad = int(state.step) in (50, 90)
    loss = jnp.where(bad, jnp.nan, metrics["train/loss"])
    return state, memory, with_value(metrics, "train/loss", loss)

  record = run(bench, dataclasses.replace(arm, step=step), "clean", 0, arm.program.init())
  assert record["stops"] == [50, 90] and record["stopped"]
  assert record["updates"] == 80 - 10  # of step 80's checkpoint, which went on from step 40's


def test_a_high_loss_is_rewound(bench, arm_of):
  arm = arm_of("rewind")
  calls = []

  def step(state, memory, batch, fault):
    state, memory, metrics = arm.step(state, memory, batch, fault)
    calls.append(int(state.step))
    high = 85 <= int(state.step) < 100
    metrics = with_value(metrics, "train/loss", metrics["train/loss"] + 2.0 * high)
    return state, memory, with_value(metrics, "rule/skipped", 0.0)

  record = run(bench, dataclasses.replace(arm, step=step), "clean", 0, arm.program.init())
  (decision,) = record["decisions"]
  assert decision[0] in (90, 100) and record["rollbacks"] == 1
  assert record["updates"] == 120 - 20 and calls == list(range(1, 121))


def test_what_comes_is_lent_and_paid_for(bench, arm_of):
  arm = arm_of("ours")
  loop = Loop(bench, arm, "schedule_x30_burst", 0)
  state = arm.program.init()
  first = loop.draw.onset - 2
  for step in range(3):
    state, _ = loop.update(step, state, loop.injection(step))
  loop.update(first - 1, jax.tree.map(jnp.copy, state), loop.injection(first - 1))
  state = dataclasses.replace(state, step=jnp.int32(first))
  ahead, rates = loop.ahead(), []
  with ahead.batches() as batches:
    for step, batch in zip(range(first, first + 4), batches, strict=False):
      want = bench.rows(0, step)["tokens"]
      np.testing.assert_array_equal(np.asarray(batch["tokens"]), want)
      state, metrics = ahead.train_step(state, batch)
      rates.append(metrics.on_host()["train/scheduled_rate"])
  assert loop.made == 4
  assert rates[2] / rates[1] > 25.0 and rates[1] / rates[0] < 2.0 and rates[3] / rates[2] < 2.0


def test_what_was_made_is_lent_again(bench, arm_of):
  """On the same rows at the same rates, but for steps that were paid for others."""
  arm = arm_of("ours")
  loop = Loop(bench, arm, "schedule_x10_burst", 0)
  state, places, states = arm.program.init(), [], []
  made = [step for step in range(loop.draw.onset + 4) if step not in (3, 4)]
  for step in made:
    places.append(loop.position())
    states.append(jax.tree.map(jnp.copy, state))
    state, _ = loop.update(
      step, dataclasses.replace(state, step=jnp.int32(step)), loop.injection(step)
    )
  for first in (0, 20):
    lent, again = loop.ahead(places[first]), states[first]
    with lent.batches() as batches:
      for batch in batches:
        again, _ = lent.train_step(again, batch)
    for old, new in zip(jax.tree.leaves(state.model), jax.tree.leaves(again.model), strict=True):
      np.testing.assert_array_equal(old, new)
    assert int(again.step) == int(state.step) == made[-1] + 1
  assert loop.made == len(made) + len(made) - 20


def test_a_trial_on_what_comes(bench, arm_of):
  """With the loop's own trial: both arms see the scenario's rows."""
  arm = arm_of("ours")
  orchestrator = dataclasses.replace(arm.program.cfg.orchestrator, branch_steps=3)
  cfg = dataclasses.replace(arm.program.cfg, orchestrator=orchestrator)
  loop = Loop(bench, arm, "minority_batch_10", 0)
  state, _ = loop.update(0, arm.program.init(), loop.injection(0))
  probe = lambda model: arm.program.eval_step(model, bench.probe, arm.program.rules(1))
  cut = SetLearningRateScale(0.5, 1.0)
  state, effect = look_ahead(cfg, state, cut, loop.ahead(), probe)
  assert loop.made == 2 * 4 * 3 and effect.without != effect.changed
  assert int(state.step) == 1


def test_the_suites():
  assert len(SUITES["audit"].seeds) == 5
  assert set(SUITES["audit_tune"].seeds) == set(range(5))
  assert not set(SUITES["audit_tune"].seeds) & set(SUITES["audit"].seeds)
  assert len(SUITES["audit_long"].seeds) == 10
  assert dict(SUITES["audit_long"].settings)["num_steps"] == 2000
  flips = [s for s in SUITES["audit"].scenarios if s.startswith("flip_")]
  assert len(flips) == 5 * 32
