"""What surgery promises: the function kept, or changed as stated, and training that goes on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
  make_test_mesh,
  micro_batches,
  named_leaves,
  random_rows,
  tiny_config,
)

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config.schema import CheckpointConfig
from ats_jax.orchestrator.actions import (
  AddExpert,
  MergeExperts,
  PruneExpert,
  RecycleExpert,
  SetPenalty,
  surgery,
)
from ats_jax.orchestrator.actions.expert_view import SurgeryError, find_layer, view_experts
from ats_jax.step.program import make_program

EXACT = 1e-5  # nats per token, float32
BASE = {"moe.num_experts": 4, "moe.spare_experts": 4, "moe.d_ff": 32, "model.d_ff": 32}
ONE_LAYER = {"model.num_layers": 1}
SIGMOID = {"moe.score": "sigmoid"}
BFLOAT16 = {"precision.compute_dtype": "bfloat16", "precision.param_dtype": "bfloat16"}


def moe_of(tree, cfg, layer):
  return surgery._moe(tree, find_layer(cfg, layer).block)


def experts_of(tree, cfg, layer):
  """The weights of a layer (or their moments) by name, on the host, experts first."""
  moe, repeat = moe_of(tree, cfg, layer), find_layer(cfg, layer).repeat
  found = {
    name: np.array(getattr(moe, name).weight[...][repeat]) for name in ("gate", "up", "down")
  }
  return found | {"router": np.array(moe.router.weight[...][repeat]).T}


def bits(tree):
  """The arrays of a tree by path, on the host."""
  typed = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  host = lambda x: np.array(jax.random.key_data(x) if typed(x) else x)
  return {name: host(x) for name, x in named_leaves(tree).items()}


def assert_same_bits(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  got = bits(got)
  for name, value in bits(want).items():
    assert got[name].tobytes() == value.tobytes(), name


# The function is kept, whatever the routing. (2 of 4 with softmax: the run below.)

VARIANTS = {
  "1 of 4, sigmoid, shared, biases, ema, dense layer": SIGMOID
  | {"moe.top_k": 1, "moe.router_bias": True, "moe.expert_bias": True, "moe.num_shared": 1}
  | {"moe.temperature": 2.0, "moe.dense_first": 1, "optimizer.ema_decay": 0.9},
  "2 of 4, sigmoid, not renormalised, groups, capacity": SIGMOID
  | ONE_LAYER
  | {"moe.num_groups": 2, "moe.top_groups": 1, "moe.renormalize": False}
  | {"moe.dispatch": "capacity"},
  "4 of 4, not renormalised, null, bfloat16": BFLOAT16
  | ONE_LAYER
  | {"moe.top_k": 4, "moe.renormalize": False, "moe.null_experts": 2},
}


@pytest.mark.thorough
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_split_keeps_the_function(mesh, changes):
  cfg = tiny_config(BASE | changes)
  program, rows, layer = make_program(cfg), random_rows(cfg, 8), cfg.model.num_layers - 1
  state = program.init()
  models = lambda: [m for m in (state.model, state.ema) if m is not None]
  loss = lambda model: (
    float(program.eval_step(model, rows, program.rules(1))[0]) / rows["loss_mask"].sum()
  )
  rng = np.random.default_rng(0)
  # Probabilities far from even, a selection bias that makes expert 0 popular, outputs that count.
  for model in models():
    moe = moe_of(model, cfg, layer)
    moe.router.weight[...] *= 30.0
    moe.down.weight[...] *= 300.0
    bias = rng.normal(0, 0.1, moe.router.bias_E.shape) + 0.5 * (
      np.arange(moe.router.bias_E.shape[1]) == 0
    )
    moe.router.bias_E[...] = jnp.array(bias, jnp.float32)
    if cfg.moe.router_bias:
      moe.router.offset[...] = jnp.array(rng.normal(0, 1, moe.router.offset.shape), jnp.float32)
    if cfg.moe.expert_bias:
      moe.down.bias[...] = jnp.array(rng.normal(0, 0.1, moe.down.bias.shape), jnp.float32)
  before = [loss(m) for m in models()]
  state = AddExpert(layer, 0).apply(state, cfg)
  after = [loss(m) for m in models()]
  np.testing.assert_allclose(after, before, rtol=0, atol=EXACT)

  view = view_experts(cfg, state, layer)
  assert view.is_open.sum() == cfg.moe.num_experts + 1
  assert view.twin[0] > 0 and view.twin[view.twin[0]] == 0
  # Both halves are in use: without either the loss is another.
  down = moe_of(state.model, cfg, layer).down.weight
  whole = down[...]
  for half in (0, view.twin[0]):
    is_other = jnp.arange(view.is_open.size) != half
    down[...] = whole * is_other[:, None, None].astype(whole.dtype)
    assert abs(loss(state.model) - before[0]) > 10 * EXACT


# One run, cut and continued in many ways.

CFG = tiny_config(
  BASE
  | {
    "num_steps": 100,
    "moe.aux_loss": 0.0,  # it counts the experts: its gradient changes with a split
    "moe.bias_rate": 0.001,
    "optimizer.grad_clip": 0.0,  # two halves have another norm than their sum
    "optimizer.ema_decay": 0.5,
  }
)
LAYER, EXPERT = 1, 4


@pytest.fixture(scope="module")
def run():
  """A trained state and its loss, and how to go on: the same four batches over and over."""
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    program, batches = make_program(CFG), [random_rows(CFG, 8, seed=s) for s in range(4)]
    rows = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}

    def train(state, steps):
      losses, metrics = [], None
      for step in range(int(state.step), int(state.step) + steps):
        state, metrics = program.train_step(
          state, micro_batches(batches[step % 4], 1), program.training_rules(1)
        )
        losses.append(float(metrics["train/loss"]))
      return state, np.array(losses), metrics

    state, losses, _ = train(program.init(), 20)
    assert losses[-1] < losses[0] - 0.3
    _, undisturbed, _ = train(jax.tree.map(jnp.copy, state), 31)

    def assert_smooth(losses, since=0, within=0.15):
      """Near those of the run that was left alone, which fall from 2.4 to 0.4."""
      want = undisturbed[since : since + len(losses)]
      assert np.abs(losses - want).max() < within

    yield SimpleNamespace(
      program=program,
      assert_smooth=assert_smooth,
      train=train,
      state=lambda: jax.tree.map(jnp.copy, state),  # what it is given to is donated
      loss=lambda s: (
        float(program.eval_step(s.model, rows, program.rules(1))[0]) / rows["loss_mask"].sum()
      ),
    )
    assert program.train_step._cache_size() == 1  # however much its state was cut


def split_run(run):
  """The trained state, split; the slots of the halves."""
  state = AddExpert(LAYER, EXPERT).apply(run.state(), CFG)
  return state, EXPERT, int(view_experts(CFG, state, LAYER).twin[EXPERT])


def test_a_split_copies_weights_and_halves_moments_and_touches_nothing_else(run):
  before, (state, one, two) = run.state(), split_run(run)
  for get, factor in (
    (lambda s: s.model, 1.0),
    (lambda s: s.ema, 1.0),
    (lambda s: s.opt_state[0].mu, 0.5),
    (lambda s: s.opt_state[0].nu, 0.5),
  ):
    old, new = experts_of(get(before), CFG, LAYER), experts_of(get(state), CFG, LAYER)
    for name in old:
      np.testing.assert_array_equal(new[name][one], factor * old[name][one])
      np.testing.assert_array_equal(new[name][two], factor * old[name][one])
      others = [s for s in range(8) if s not in (one, two)]
      np.testing.assert_array_equal(new[name][others], old[name][others])
      assert np.abs(old[name][one]).max() > 0
    assert_same_bits(get(state).embed, get(before).embed)
    for name, value in experts_of(get(before), CFG, 0).items():
      np.testing.assert_array_equal(experts_of(get(state), CFG, 0)[name], value)
  old, new = (moe_of(s.model, CFG, LAYER).router for s in (before, state))
  np.testing.assert_array_equal(new.bias_E[...][1, two], old.bias_E[...][1, one])
  np.testing.assert_array_equal(
    new.load_E[...][1, jnp.array([one, two])], old.load_E[...][1, one] / 2
  )
  u = np.array(new.direction_SD[...][1, one])
  assert np.linalg.norm(u) == pytest.approx(1.0, abs=1e-6)
  columns = np.array(new.weight[...][1])
  assert np.abs(u @ columns / np.linalg.norm(columns, axis=0)).max() < 0.01  # chance: 0.125
  assert_same_bits(state.key, before.key)


def test_the_gradients_of_the_halves_add_up(run):
  """After a step on both: the moments of the halves sum to those without a split."""
  (state, one, two), b1 = split_run(run), CFG.optimizer.b1
  (state, split_losses, _), (whole, losses, _) = run.train(state, 1), run.train(run.state(), 1)
  np.testing.assert_allclose(split_losses, losses, rtol=0, atol=EXACT)
  got, want = (experts_of(s.opt_state[0].mu, CFG, LAYER) for s in (state, whole))
  old = experts_of(run.state().opt_state[0].mu, CFG, LAYER)
  for name in got:
    close = lambda a, b, name=name: np.testing.assert_allclose(a, b, 1e-4, 1e-7, err_msg=name)
    close(got[name][one] + got[name][two], want[name][one])
    others = [s for s in range(8) if s not in (one, two)]
    close(got[name][others], want[name][others])
    for half in (one, two):  # both had tokens
      assert np.abs(got[name][half] - b1 * old[name][one] / 2).max() > 1e-5
  close(np.array(state.model.embed.weight[...]), np.array(whole.model.embed.weight[...]))


def test_training_goes_on_and_the_halves_diverge(run):
  state, one, two = split_run(run)
  state, losses, metrics = run.train(state, 30)
  run.assert_smooth(losses)
  weights = experts_of(state.model, CFG, LAYER)
  for name, w in weights.items():
    assert np.abs(w[one] - w[two]).max() > 0.1 * np.abs(w[one]).max(), name
  load = np.array(metrics.layers["moe/load"])[LAYER]
  assert (load[[one, two]] > 0.01).all()
  assert view_experts(CFG, state, LAYER).load == pytest.approx(load)


def test_a_release_goes_gradually_and_ends_with_two_whole_experts(run):
  state, one, two = split_run(run)
  state, _, _ = run.train(state, 20)
  losses = [run.loss(state)]
  for penalty in (20.0, 6.0, 3.0, 1.0, 0.0):
    assert view_experts(CFG, state, LAYER).twin[one] == two
    state = SetPenalty(LAYER, two, penalty).apply(state, CFG)
    losses.append(run.loss(state))
  assert abs(losses[1] - losses[0]) < EXACT  # exp(-20)
  assert np.abs(np.diff(losses)).max() < 0.1
  view = view_experts(CFG, state, LAYER)
  assert (view.twin < 0).all() and (view.penalty == 0).all()
  before = run.loss(state)
  state = AddExpert(LAYER, one).apply(state, CFG)  # now it is an expert like any other
  assert abs(run.loss(state) - before) < EXACT


def test_pruning_a_half_undoes_a_split(run):
  for half in (0, 1):
    state, *halves = split_run(run)
    state = PruneExpert(LAYER, halves[half]).apply(state, CFG)
    assert abs(run.loss(state) - run.loss(run.state())) < EXACT
    view = view_experts(CFG, state, LAYER)
    assert (view.twin < 0).all() and view.is_open[halves[1 - half]]
    assert view.load.sum() == pytest.approx(1.0)


def without_tokens(run, expert):
  """The trained state with an expert that nothing goes to, a step later."""
  state = run.state()
  router = moe_of(state.model, CFG, LAYER).router
  router.bias_E[...] = router.bias_E[...].at[1, expert].set(-5.0)
  return run.train(state, 1)[0]


def test_a_dead_expert_is_pruned_or_recycled(run):
  dead = 6
  state = without_tokens(run, dead)
  before, view = run.loss(state), view_experts(CFG, state, LAYER)
  source = view.most_loaded()
  state = RecycleExpert(LAYER, dead).apply(state, CFG)
  assert abs(run.loss(state) - before) < EXACT
  view = view_experts(CFG, state, LAYER)
  assert view.twin[dead] == source and view.is_open.sum() == 4
  for moment in state.opt_state[0].mu, state.opt_state[0].nu:
    for name, m in experts_of(moment, CFG, LAYER).items():
      assert np.abs(m[dead]).max() > 0, name
  state, losses, metrics = run.train(state, 30)
  run.assert_smooth(losses, since=1, within=0.25)
  assert np.array(metrics.layers["moe/load"])[LAYER, dead] > 0.01

  pruned = PruneExpert(LAYER, dead).apply(without_tokens(run, dead), CFG)
  assert abs(run.loss(pruned) - before) < EXACT
  _, losses, metrics = run.train(pruned, 30)
  run.assert_smooth(losses, since=1, within=0.25)
  assert np.array(metrics.layers["moe/load"])[LAYER, dead] == 0.0


def test_merging_a_fresh_pair_is_exact_and_a_trained_one_close(run):
  state, one, two = split_run(run)
  before = run.loss(state)
  state = MergeExperts(LAYER, one, two).apply(state, CFG)
  assert abs(run.loss(state) - before) < EXACT
  want = run.state().opt_state[0]  # all of the moments is back
  for got, old in ((state.opt_state[0].mu, want.mu), (state.opt_state[0].nu, want.nu)):
    for name, m in experts_of(got, CFG, LAYER).items():
      np.testing.assert_array_equal(m[one], experts_of(old, CFG, LAYER)[name][one])

  state, one, two = split_run(run)
  state, _, _ = run.train(state, 10)
  before, weights = run.loss(state), experts_of(state.model, CFG, LAYER)
  load = view_experts(CFG, state, LAYER).load
  state = MergeExperts(LAYER, two, one).apply(state, CFG)
  assert abs(run.loss(state) - before) < 0.1
  share = load[two] / (load[one] + load[two])
  for name, w in experts_of(state.model, CFG, LAYER).items():
    mean = share * weights[name][two] + (1 - share) * weights[name][one]
    np.testing.assert_allclose(w[two], mean, 1e-5, 1e-7)
  view = view_experts(CFG, state, LAYER)
  assert view.is_open[two] and not view.is_open[one] and (view.twin < 0).all()
  assert view.load[two] == pytest.approx(load[one] + load[two])


def test_every_edit_goes_through_a_checkpoint_bit_for_bit(run, tmp_path):
  state, _, two = split_run(run)
  state = AddExpert(0, 2).apply(state, CFG)
  state = SetPenalty(LAYER, two, 5.0).apply(state, CFG)
  state = PruneExpert(LAYER, 6).apply(state, CFG)
  state = MergeExperts(0, 0, 4).apply(state, CFG)
  state = RecycleExpert(0, 6).apply(state, CFG)
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    manager.save(int(state.step), state, {})
  abstract = abstract_like(run.program.init(abstract=True), jax.sharding.get_mesh())
  with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
    _, restored, _ = manager.restore_latest(abstract)
  assert_same_bits(restored, state)
  for layer in (0, 1):
    for got, want in zip(
      view_experts(CFG, restored, layer), view_experts(CFG, state, layer), strict=True
    ):
      np.testing.assert_array_equal(got, want)
  (restored, got, _), (state, want, _) = run.train(restored, 2), run.train(state, 2)
  np.testing.assert_array_equal(got, want)
  assert_same_bits(restored, state)


def test_edits_are_deterministic_and_compiled_once_for_all_slots_and_layers(run):
  compiled = lambda: [f._cache_size() for f in (surgery.split, surgery.prune, surgery.merge)]
  state, _, _ = split_run(run)
  assert_same_bits(state, split_run(run)[0])
  state = MergeExperts(LAYER, 0, 2).apply(PruneExpert(LAYER, EXPERT).apply(state, CFG), CFG)
  before = compiled()
  other = AddExpert(0, 2, 7).apply(run.state(), CFG)
  other = MergeExperts(0, 7, 2).apply(PruneExpert(0, 0).apply(other, CFG), CFG)
  assert compiled() == before
  direction = lambda s, layer, e: np.array(
    moe_of(s.model, CFG, layer).router.direction_SD[...][layer, e]
  )
  first = direction(split_run(run)[0], LAYER, EXPERT)
  later = AddExpert(LAYER, EXPERT).apply(run.train(run.state(), 1)[0], CFG)
  assert abs(first @ direction(later, LAYER, EXPERT)) < 0.9


def test_what_cannot_be_done_is_refused_and_changes_nothing(run):
  state, one, two = split_run(run)
  idle = int(np.flatnonzero(~view_experts(CFG, state, LAYER).is_open)[0])
  other = AddExpert(LAYER, 0).apply(run.state(), CFG)
  before = bits(state)
  refused = [
    (AddExpert, (2, 0), "layer 2 has no experts; layers [0, 1] have"),
    (AddExpert, (LAYER, 8), "has no slot 8: it has 0 to 7"),
    (AddExpert, (LAYER, idle), f"slot {idle} is idle, no expert in use"),
    (AddExpert, (LAYER, 0, 2), "slot 2 is in use"),
    (AddExpert, (LAYER, one), f"is a half of a split expert, the other is {two}"),
    (AddExpert, (LAYER, two), f"is a half of a split expert, the other is {one}"),
    (SetPenalty, (LAYER, 0, 1.0), "no half"),
    (SetPenalty, (LAYER, one, -1.0), "penalty=-1.0 is not in"),
    (SetPenalty, (LAYER, one, float("nan")), "penalty=nan is not in"),
    (PruneExpert, (LAYER, idle), "is idle"),
    (RecycleExpert, (LAYER, idle), "is idle"),
    (MergeExperts, (LAYER, 0, 0), "cannot be merged with itself"),
    (MergeExperts, (LAYER, one, 0), "is a half"),
    (MergeExperts, (LAYER, 0, one), "is a half"),
  ]
  for kind, args, message in refused:
    with pytest.raises(SurgeryError, match=message.replace("[", r"\[")):
      kind(*args).apply(state, CFG)
  after = bits(state)
  assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())

  # Two experts of four are the least that top_k = 2 needs; a pair is one.
  other = PruneExpert(LAYER, 2).apply(other, CFG)
  other = PruneExpert(LAYER, 4).apply(other, CFG)
  too_few = r"can choose among 1 experts .* moe.top_k=2"
  for kind in (PruneExpert, RecycleExpert):
    with pytest.raises(SurgeryError, match=too_few):
      kind(LAYER, 6).apply(other, CFG)
  other = PruneExpert(LAYER, 0).apply(other, CFG)  # a half: its twin stays
  assert np.flatnonzero(view_experts(CFG, other, LAYER).is_open).tolist() == [1, 6]
  with pytest.raises(SurgeryError, match=too_few):
    MergeExperts(LAYER, 1, 6).apply(other, CFG)
  for expert in (1, 6):
    other = AddExpert(LAYER, expert).apply(other, CFG)
  with pytest.raises(SurgeryError, match="all experts are halves"):
    view_experts(CFG, other, LAYER).most_loaded()


@pytest.mark.thorough
def test_with_an_offset_a_merged_expert_keeps_the_sum_of_probabilities(mesh):
  cfg = tiny_config(BASE | ONE_LAYER | {"moe.router_bias": True, "moe.temperature": 1.5})
  state = make_program(cfg).init()
  x = np.random.default_rng(0).standard_normal((4096, cfg.model.d_model))

  def logits(state, expert):
    router = moe_of(state.model, cfg, 0).router
    along = x @ np.array(router.weight[...][0, :, expert])
    return along / cfg.moe.temperature, float(router.offset[...][0, expert]) / cfg.moe.temperature

  together = np.logaddexp(logits(state, 0)[0], logits(state, 2)[0])
  column, offset = logits(MergeExperts(0, 0, 2).apply(state, cfg), 0)
  assert np.mean(column - together) == pytest.approx(-np.log(2), abs=0.05)
  assert np.mean(column + offset - together) == pytest.approx(0.0, abs=0.05)
