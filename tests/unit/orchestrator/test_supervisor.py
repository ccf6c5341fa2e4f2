"""The supervisor on the real step of a tiny model: planted faults, what it does about them."""

import dataclasses
import json

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import counting_rows, micro_batches, tiny_config

from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.policy import decide as policy_module
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.record.narrate import tell
from ats_jax.orchestrator.supervisor import Supervisor
from ats_jax.orchestrator.trials.snapshots import (
  COPIES,
  COPIES_OF_COMPARISON,
  Snapshot,
  Snapshots,
  local_bytes,
)
from lab.faults.inject import Fault, with_faults

FAULT_STEP, STEPS = 128, 180
# The default schedule, so that the rate is low at the end.
CFG = tiny_config(
  {
    "num_steps": STEPS,
    "optimizer.warmup_steps": 10,
    "orchestrator.mode": "act",
    "orchestrator.check_interval": 8,
    "orchestrator.snapshot_interval": 8,
  }
)
EVERY = CFG.orchestrator.check_interval
NO_FAULT = Fault(jnp.float32(1.0), jnp.float32(1.0))


@pytest.fixture(scope="module")
def program():
  """One compiled step for all runs of this file."""
  with jax.set_mesh(canonical.mesh()):
    yield with_faults(canonical.program(CFG))


class Run:
  """A run of `plan`, with a hand in it."""

  def __init__(self, program, path=None, probe=True, **kwargs):
    self.program, self.path, self.state, self.step = program, path, canonical.state(CFG), 0
    self.supervisor = Supervisor(program, counting_rows(10**6) if probe else None, path, **kwargs)
    self.supervisor.start(0, self.state)

  def __call__(self, steps, *, noise=False, **fault):
    given = Fault(*(jnp.float32(fault.get(name, 1.0)) for name in Fault._fields))
    for _ in range(steps):
      self.step += 1
      batch = micro_batches(counting_rows(self.step, noise=noise), 1)
      self.state, self.metrics = self.program.train_step(
        self.state, batch, self.program.training_rules(1), fault=given
      )
      self.state = self.supervisor.after(self.step, self.state, self.metrics)
    return self

  def spoil(self, factor):
    """Multiplies the output matrix."""
    spoiled = lambda path, x: x * factor if "head" in jax.tree_util.keystr(path) else x
    model = jax.tree_util.tree_map_with_path(spoiled, self.state.model)
    self.state = dataclasses.replace(self.state, model=model)

  def end(self):
    self.state = self.supervisor.settle(self.step, self.state, self.metrics)
    self.supervisor.close()
    return [d for _, d in self.supervisor.decisions]

  def probe_loss(self):
    cross_entropy, _, tokens = np.asarray(
      self.program.eval_step(self.state.model, counting_rows(10**6), self.program.rules(1))
    )
    return cross_entropy / tokens


@pytest.fixture(scope="module")
def clean_loss(program):
  run = Run(program)(STEPS)
  assert not run.end()
  return run.probe_loss()


def interventions(decisions):
  return [(d.cause, d.action) for d in decisions if d.cause != "recovery"]


def causes(checks):
  """What the policy found, look by look."""
  kinds = {"state", "count", "data", "system", "unclear"}
  return [name for row in checks for name in row["health"]["names"] if name in kinds]


def rate(run):
  """The learning rate that was applied last."""
  return float(run.metrics["train/learning_rate"])


def test_the_host_reads_only_at_looks_and_only_what_is_old(program, monkeypatch):
  run, real, read = Run(program), jax.device_get, []

  def device_get(tree):
    read.append((run.step, len(tree) if isinstance(tree, list) else 1))
    return real(tree)

  monkeypatch.setattr(jax, "device_get", device_get)
  run(40)
  # The first interval has none before it; each look reads the rows of one, and its probe.
  assert read == [x for look in range(2 * EVERY, 41, EVERY) for x in ((look, EVERY), (look, 1))]


def test_a_spoilt_state_is_rolled_back(program, tmp_path, clean_loss):
  run = Run(program, tmp_path / "decisions.jsonl")(FAULT_STEP)
  run.spoil(np.nan)
  programs = program.train_step._cache_size(), program.eval_step._cache_size()
  run(STEPS - FAULT_STEP)
  assert (program.train_step._cache_size(), program.eval_step._cache_size()) == programs
  assert int(run.state.step) == run.step  # the data is not rewound
  assert interventions(run.end()) == [("state", Rollback())]
  assert run.probe_loss() < clean_loss + 0.15
  recorded = ledger.read_lines(run.path)
  (decision,) = [row for row in recorded if row["kind"] == "decision"]
  assert decision["applied"] and FAULT_STEP - 40 < decision["to"] < FAULT_STEP
  assert ledger.replay(run.path) == ledger.decisions(run.path) == run.supervisor.decisions
  story = "\n".join(tell(run.path))
  for words in ("critical: state", f"rolls back to step {decision['to']}"):
    assert words in story
  saved = json.loads(json.dumps(run.supervisor.saved()))  # as in a checkpoint
  again = Supervisor(program, counting_rows(10**6))
  again.start(run.step, run.state, saved)
  assert again.policy == run.supervisor.policy != PolicyState()


def test_the_last_steps_are_looked_at_before_the_end(program, clean_loss):
  run = Run(program)(STEPS - 5)
  run.spoil(np.nan)
  run(5)
  assert interventions(run.end()) == [("state", Rollback())]
  assert run.probe_loss() < clean_loss + 0.15


def test_a_burst_of_noise_is_trained_on_and_told(program, tmp_path, clean_loss):
  """Nothing finite is left out; the bounds alone keep the harm small."""
  run = Run(program, tmp_path / "decisions.jsonl")
  run(FAULT_STEP)(16, noise=True)(STEPS - FAULT_STEP - 16)
  assert not run.end()
  assert run.probe_loss() < clean_loss + 0.15
  lines = list(ledger.read_lines(run.path))
  assert not any(row["left_out"] for row in lines if row["kind"] == "bounded")
  assert set(causes([row for row in lines if row["kind"] == "check"])) <= {"unclear"}


def test_a_schedule_thirty_times_too_high_is_held_and_reported(program, tmp_path, clean_loss):
  steps = 30
  run = Run(program, tmp_path / "decisions.jsonl", schedule=None)(FAULT_STEP)
  known = rate(run)
  run(steps, schedule=30.0)
  assert rate(run) < 1.6e-2 < 30.0 * known / 3  # 1.35 times 1e-2, the highest before, and a little
  run(STEPS - FAULT_STEP - steps)
  assert not interventions(run.end())
  assert run.probe_loss() < clean_loss + 0.15
  recorded = ledger.read_lines(run.path)
  checks = [row for row in recorded if row["kind"] == "check"]
  assert set(causes(checks)) <= {"unclear"}
  assert any("is limited" in cause for row in checks for cause in row["health"]["causes"])
  shrunk = [step for row in recorded if row["kind"] == "bounded" for step in row["shrunk"]]
  assert shrunk == list(range(FAULT_STEP + 1, FAULT_STEP + steps + 1))


def test_a_gradient_broken_for_ever_ends_the_run_and_says_so(program, tmp_path, monkeypatch):
  monkeypatch.setattr(policy_module, "BROKEN_STOP", 40)
  run = Run(program, tmp_path / "decisions.jsonl")(20)
  with pytest.raises(FloatingPointError, match=r"no loss or gradient was finite.* run the same"):
    run(70, gradient=np.nan)
  assert 40 <= run.step - 20 <= 40 + 16  # it looks each eight steps
  run.supervisor.close()
  assert ledger.read_lines(run.path)[-1]["action"] == "Stop"


def test_without_room_for_snapshots_the_checkpoint_is_used(program):
  cfg = program.cfg
  small = dataclasses.replace(
    cfg, orchestrator=dataclasses.replace(cfg.orchestrator, snapshot_gb=0)
  )
  saved = canonical.state(CFG)
  run = Run(dataclasses.replace(program, cfg=small), restore=lambda: (40, saved, {}))(60)
  run.spoil(np.nan)
  run(24)
  assert interventions(run.end()) == [("state", Rollback())]
  assert np.isfinite(run.probe_loss())


def test_observing_writes_the_same_findings_and_applies_none(program, tmp_path):
  cfg = program.cfg
  observing = dataclasses.replace(cfg.orchestrator, mode="observe")
  program = dataclasses.replace(program, cfg=dataclasses.replace(cfg, orchestrator=observing))
  run = Run(program, tmp_path / "decisions.jsonl")(FAULT_STEP)
  run.spoil(100.0)
  run(32)
  assert run.end()
  made = [row for row in ledger.read_lines(run.path) if row["kind"] == "decision"]
  assert made[0]["action"] == "Rollback" and not any(row["applied"] for row in made)
  assert "would do, but did not: rolls back" in "\n".join(tell(run.path))
  assert run.probe_loss() > 5.0


def test_nothing_is_read_that_is_not_an_interval_old(program):
  """The loop never waits for the device: no array is read in the interval that made it."""
  run = Run(program)(8)
  waited = []

  class Spy:
    """Stands for a metric on its way to the host."""

    def __init__(self, values, step):
      self.values, self.step = values, step

    def copy_to_host_async(self):
      pass

    def __array__(self, dtype=None, copy=None):
      waited.append(run.step - self.step)
      return np.asarray(self.values)

  after = run.supervisor.after

  def spied(step, state, metrics):
    return after(step, state, dataclasses.replace(metrics, values=Spy(metrics.values, step)))

  run.supervisor.after = spied
  run(40)
  assert len(waited) >= 32 and min(waited) >= 8


def test_a_probe_of_padding_is_refused(program):
  empty = {**counting_rows(0), "loss_mask": np.zeros((8, 16), np.float32)}
  with pytest.raises(ValueError, match="holds no token"):
    Supervisor(program, empty).start(0, canonical.state(CFG))


def test_what_a_hook_raises_is_not_hidden(program):
  @hooks.register
  def broken(look):
    raise RuntimeError(f"hook at {look.step}")

  try:
    with pytest.raises(RuntimeError, match="hook at 16"):
      Run(program)(16)
  finally:
    hooks.unregister(broken)


# ---- snapshots


def test_the_ring_holds_two_good_states_and_a_candidate(program):
  state, ring = canonical.state(CFG), Snapshots(10, 2**30)
  ring.start(0, state)
  ring.offer(5, state)
  assert ring.candidate is None  # too early
  for step in (10, 20, 30):
    ring.offer(step, state)
    ring.confirm(step)  # its own step proves nothing
    assert ring.candidate is not None
    ring.confirm(step + 1)
  assert [s.step for s in ring.good] == [20, 30]
  assert [ring.back(n).step for n in (0, 1, 2)] == [30, 20, 20]
  ring.offer(40, state)
  ring.reject()
  ring.confirm(41)
  assert ring.back(0).step == 30
  ring.offer(50, state)
  assert ring.candidate.step == 50


def test_a_snapshot_outlives_the_state_and_comes_back_where_it_was(program):
  state = canonical.state(CFG)
  want = jax.tree.map(np.asarray, (state.model, state.opt_state, state.reflex))
  shardings = [x.sharding for x in jax.tree.leaves(state)]
  snapshot = Snapshot.take(0, state)
  assert {x.sharding.memory_kind for x in jax.tree.leaves(snapshot.arrays)} == {"pinned_host"}
  state, _ = program.train_step(
    state, micro_batches(counting_rows(0), 1), program.training_rules(1), fault=NO_FAULT
  )  # donates it
  for _ in range(2):
    back = snapshot.resume()
    got = (back.model, back.opt_state, back.reflex)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(np.asarray(a), b)
    assert [x.sharding for x in jax.tree.leaves(back)] == shardings


def test_a_run_goes_on_from_the_newest_good_state_unless_a_later_one_is_on_the_disk(program):
  state, ring = canonical.state(CFG), Snapshots(10, 2**30)
  assert ring.newest([]) is None
  ring.start(0, state)
  state, _ = program.train_step(
    state, micro_batches(counting_rows(0), 1), program.training_rules(1), fault=NO_FAULT
  )
  want = [np.asarray(x) for x in jax.tree.leaves((state.model, state.control, state.step))]
  key = np.array(jax.random.key_data(state.key))
  ring.offer(10, state, {"remembered": 1})
  assert ring.newest([])[0] == 0  # the newer one is not known to be good
  ring.confirm(11)
  program.train_step(
    state, micro_batches(counting_rows(1), 1), program.training_rules(1), fault=NO_FAULT
  )  # the state is gone
  step, again, saved = ring.newest([5, 9])
  assert step == 10 and saved == {"remembered": 1}
  got = [np.asarray(x) for x in jax.tree.leaves((again.model, again.control, again.step))]
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(jax.random.key_data(again.key), key)
  program.train_step(
    again, micro_batches(counting_rows(1), 1), program.training_rules(1), fault=NO_FAULT
  )
  assert ring.newest([5, 10]) is None


def test_memory_is_priced_from_the_state(program):
  state = canonical.state(CFG)
  parts = (state.model, state.opt_state, state.ema, state.reflex)
  size = sum(x.nbytes for x in jax.tree.leaves(parts))
  assert local_bytes(state) == size
  assert Snapshots(10, COPIES * size).fits(state)
  assert not Snapshots(10, COPIES * size).fits(state, 1)
  assert Snapshots(10, (COPIES + COPIES_OF_COMPARISON) * size).fits(state, COPIES_OF_COMPARISON)
  ring = Snapshots(10, COPIES * size - 1)
  ring.start(0, state)
  ring.offer(100, state)
  assert not ring.good and ring.candidate is None
