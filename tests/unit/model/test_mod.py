"""A block that some tokens skip against a second one, written here token by token in NumPy."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_test_mesh, named_leaves, pack, thorough_but, tiny_config

from ats_jax.model.block import Block, TokenContext
from ats_jax.model.forward_pass import Pass
from ats_jax.model.layer_kinds import LayerKind
from ats_jax.model.mod import DepthRouter
from ats_jax.model.numerics import numerics
from ats_jax.model.param import merge, trainable
from ats_jax.ops.rope import rope_table
from ats_jax.sharding.apply import reshard

# float64 on both sides, but for the cosines and sines of RoPE, which the model keeps in float32.
RTOL, ATOL = 2e-6, 2e-6
# Central differences in float64 against the same float32 cosines and sines.
EPS, GRAD_RTOL, GRAD_ATOL = 1e-5, 2e-5, 2e-6
LAYER, CAPACITY, SEQ = 3, 0.4, 12
PLACES = {True: 5, False: 6}  # ceil(0.4 * 12), ceil(1.25 * 0.4 * 12)
# Two documents; fewer real tokens than places; nothing but padding.
SEGMENTS, POSITIONS = pack([[12], [5, 4], [2, 1], []], SEQ)
VALID = SEGMENTS > 0
SMALL = {
  "model.d_model": 16,
  "model.num_heads": 4,
  "model.num_kv_heads": 2,
  "model.d_ff": 24,
  "model.qk_norm": True,
  "model.init_std": 0.4,
  "mod.capacity": CAPACITY,
}


# The reference. `p` holds float64 arrays by name; the choice is made anew at each call.


class Want(NamedTuple):
  y: np.ndarray
  went: np.ndarray
  stats: dict[str, float]


def unit(x, eps=1e-6):
  return x / np.sqrt(np.mean(x * x) + eps)


def rotate(x, position, theta):
  half = len(x) // 2
  angle = position * theta ** (-np.arange(half) / half)
  z = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
  return np.concatenate([z.real, z.imag])


def attend(p, row, tokens, segments, positions, cfg):
  """Each of `tokens`, in order, looks at those of its segment that came before; {token: output}."""
  m, seen, out = cfg.model, [], {}
  for t in tokens:
    h = unit(row[t]) * p["attn_norm.scale"]
    heads = lambda w, norm, h=h, t=t: [
      rotate(unit(h @ w[:, n]) * norm, positions[t], m.rope_theta) for n in range(w.shape[1])
    ]
    q = heads(p["attn.q.weight"], p["attn.q_norm.scale"])
    keys = heads(p["attn.k.weight"], p["attn.k_norm.scale"])
    seen.append((segments[t], keys, h @ p["attn.v.weight"].swapaxes(0, 1)))
    same = [(k, v) for segment, k, v in seen if segment == segments[t]]
    out[t] = np.zeros_like(h)
    for n in range(m.num_heads):
      group = n * m.num_kv_heads // m.num_heads
      scores = np.array([q[n] @ k[group] for k, _ in same]) / math.sqrt(m.head_dim)
      weights = np.exp(scores - scores.max())
      value = sum(w * v[group] for w, (_, v) in zip(weights / weights.sum(), same, strict=True))
      out[t] += value @ p["attn.out.weight"][n]
  return out


def feed(p, x):
  h = unit(x) * p["mlp_norm.scale"]
  gate = h @ p["mlp.gate.weight"]
  return (gate / (1 + np.exp(-gate)) * (h @ p["mlp.up.weight"])) @ p["mlp.down.weight"]


def choose(p, row, valid, positions, cfg, training):
  """Wanted tokens in order of position, those the causal rule wants, gates, predictor's odds."""
  real = [t for t in range(SEQ) if valid[t]]
  if cfg.mod.routing == "static":
    c = Fraction(2, 5)
    steps = lambda t: math.floor((t + LAYER) * c)
    wanted = [t for t in real if steps(int(positions[t]) + 1) > steps(int(positions[t]))]
    return wanted, wanted, np.ones(SEQ), None, None
  units = [unit(x) for x in row]
  scores = np.array([u @ p["depth.weight"] for u in units])
  odds = None
  if cfg.mod.decision == "predictor":
    hidden = [u @ p["depth.predict_in"] for u in units]
    odds = np.array([(h / (1 + np.exp(-h))) @ p["depth.predict_out"] for h in hidden])
    causal = [t for t in real if odds[t] > 0]
  else:
    causal = [t for t in real if scores[t] > p["depth.threshold"]]
  wanted = causal
  if training:
    wanted = sorted(sorted(real, key=lambda t: (-scores[t], t))[: PLACES[True]])
  return wanted, causal, 1 / (1 + np.exp(-scores)), odds, scores


def reference(p, x, cfg, training):
  y, went = x.copy(), np.zeros(VALID.shape, bool)
  stats = dict.fromkeys(("tokens", "routed", "overflow", "gate", "agree"), 0.0)
  stats |= dict.fromkeys(("threshold", "rows", "predictor_loss"), 0.0)
  for b in range(len(x)):
    around = (SEGMENTS[b], POSITIONS[b], cfg)
    if cfg.mod.scope == "ffn":
      attended = attend(p, y[b], range(SEQ), *around)
      y[b] = [y[b, t] + attended[t] for t in range(SEQ)]
    wanted, causal, gate, odds, scores = choose(p, y[b], VALID[b], POSITIONS[b], cfg, training)
    chosen = wanted[: PLACES[training]]
    before = y[b].copy()
    attended = attend(p, before, chosen, *around) if cfg.mod.scope == "block" else {}
    for t in chosen:
      a = attended.get(t, np.zeros_like(before[t]))
      y[b, t] = before[t] + gate[t] * (a + feed(p, before[t] + a))
      went[b, t] = True
    real = np.flatnonzero(VALID[b])
    stats["tokens"] += len(real)
    stats["routed"] += len(chosen)
    stats["overflow"] += len(wanted) - len(chosen)
    stats["gate"] += sum(gate[t] for t in chosen)
    stats["agree"] += sum((t in causal) == (t in wanted) for t in real)
    if scores is not None and len(real) > PLACES[training]:
      ranked = sorted((scores[t] for t in real), reverse=True)
      stats["threshold"] += (ranked[PLACES[training] - 1] + ranked[PLACES[training]]) / 2
      stats["rows"] += 1
    if odds is not None:
      for t in real:
        stats["predictor_loss"] += math.log1p(math.exp(odds[t])) - (t in chosen) * odds[t]
  return Want(y, went, stats)


# The model.


def make_block(cfg, dtype: str = "float64") -> Block:
  dtypes = dict(param_dtype=jnp.dtype(dtype), compute_dtype=jnp.dtype(dtype))
  num = dataclasses.replace(numerics(cfg), **dtypes)
  kind = LayerKind(moe=False, mod=True)
  return jax.jit(lambda key: Block(cfg, num, nnx.Rngs(params=key), kind))(jax.random.key(1))


def call(block, x, cfg, rules):
  on = lambda a: reshard(jnp.asarray(a), "batch", "seq")
  table = rope_table(on(POSITIONS), cfg.model.head_dim, cfg.model.rope_theta)
  tokens = TokenContext(on(POSITIONS), on(SEGMENTS), table)
  x = reshard(x, "batch", "seq", "act_embed")
  y, stats, went, _ = block(x, tokens, rules, layer=jnp.int32(LAYER), key=None)
  return y, stats.mod, went


def by_name(tree) -> dict[str, np.ndarray]:
  return {k.removesuffix(".value")[1:]: np.asarray(v) for k, v in named_leaves(tree).items()}


def off_the_start(block: Block) -> Block:
  """Norms that are not 1, and a threshold that most tokens pass."""
  rng = np.random.default_rng(7)
  noisy = lambda a: a + jnp.asarray(0.2 * rng.standard_normal(a.shape), a.dtype)
  block = merge(jax.tree.map(noisy, trainable(block)), block)
  if hasattr(block.depth, "threshold"):
    block.depth.threshold[...] = jnp.float64(-1.5)
    block.depth.updates[...] = jnp.float64(1.0)
  return block


def check_stats(got, want: dict[str, float], names) -> None:
  for name in names:
    np.testing.assert_allclose(getattr(got, name), want[name], RTOL, ATOL, err_msg=name)


ALWAYS = ("tokens", "routed", "overflow", "gate")
VARIANTS = [
  ("learned", "block", "threshold"),
  ("learned", "ffn", "predictor"),
  ("static", "ffn", "threshold"),
]


@pytest.fixture
def wide():
  with jax.enable_x64(True), jax.set_mesh(make_test_mesh(1, 1, 1)):
    yield


@pytest.mark.parametrize("variant", thorough_but(VARIANTS, 0, 1), ids="-".join)
def test_block_against_the_reference(wide, variant):
  routing, scope, decision = variant
  choice = {"mod.routing": routing, "mod.scope": scope, "mod.decision": decision}
  cfg = tiny_config(SMALL | choice)
  block = off_the_start(make_block(cfg))
  rng = np.random.default_rng(0)
  x, dy = rng.standard_normal((2, *SEGMENTS.shape, cfg.model.d_model))
  training, evaluation = (Pass(training=t, capacity=CAPACITY) for t in (True, False))

  @jax.jit
  def run(block, x, dy):
    def f(params, x):
      y, stats, went = call(merge(params, block), x, cfg, training)
      return (y, stats.predictor_loss), (stats, went)

    (y, loss), pull, (stats, went) = jax.vjp(f, trainable(block), x, has_aux=True)
    of_y, of_loss = pull((dy, jnp.zeros_like(loss))), pull((jnp.zeros_like(y), jnp.ones_like(loss)))
    return y, stats, went, of_y, of_loss, call(block, x, cfg, evaluation)

  y, stats, went, of_y, of_loss, (eval_y, eval_stats, eval_went) = run(block, x, dy)
  assert y.dtype == np.float64
  p = by_name(block)

  want = reference(p, x, cfg, True)
  np.testing.assert_array_equal(went, want.went)
  np.testing.assert_allclose(y, want.y, RTOL, ATOL)
  check_stats(stats, want.stats, ALWAYS)
  if routing == "learned":  # as many as there are places, of the tokens that are no padding
    check_stats(stats, want.stats, want.stats)
    assert 0 < want.stats["agree"] < want.stats["tokens"]
    real = VALID.sum(1)
    np.testing.assert_array_equal(want.went.sum(1), np.minimum(real, PLACES[True]))
    assert not (want.went & ~VALID).any() and real.min() == 0 and (real > 0).sum() == 3

  eval_want = reference(p, x, cfg, False)
  np.testing.assert_array_equal(eval_went, eval_want.went)
  np.testing.assert_allclose(eval_y, eval_want.y, RTOL, ATOL)
  assert not (eval_want.went & ~VALID).any() and eval_want.went.sum() >= 5
  check_stats(eval_stats, eval_want.stats, (*ALWAYS, "agree", "predictor_loss"))
  assert eval_stats.agree == eval_stats.tokens
  if decision == "threshold" and routing == "learned":
    assert eval_want.stats["overflow"] > 0

  def slope(of, name, array):
    """The derivative of a function of `array` along a random direction, and the direction."""
    direction = np.random.default_rng(len(name)).standard_normal(array.shape)
    up, down = of(array + EPS * direction), of(array - EPS * direction)
    return (up - down) / (2 * EPS), direction

  leaves = [*by_name(trainable(block)), "x"]
  grads = by_name(of_y[0]) | {"x": np.asarray(of_y[1])}
  loss_grads = by_name(of_loss[0]) | {"x": np.asarray(of_loss[1])}
  assert set(leaves) == set(grads) == set(loss_grads)
  for name in leaves:
    at = lambda a, name=name: reference(p | {name: a}, a if name == "x" else x, cfg, True)
    array = x if name == "x" else p[name]
    if "predict" in name:
      assert not grads[name].any(), name
      wanted, direction = slope(lambda a, at=at: at(a).stats["predictor_loss"], name, array)
      got = np.sum(loss_grads[name] * direction)
    else:
      assert not loss_grads[name].any(), name
      wanted, direction = slope(lambda a, at=at: np.sum(at(a).y * dy), name, array)
      got = np.sum(grads[name] * direction)
    np.testing.assert_allclose(got, wanted, GRAD_RTOL, GRAD_ATOL, err_msg=name)
    assert abs(wanted) > 1e-2, name


def test_random_routing_draws_anew_in_training_and_by_position_in_evaluation(mesh):
  cfg = tiny_config(SMALL | {"mod.routing": "random", "mod.capacity": 0.3})
  depth = DepthRouter(cfg, numerics(cfg), nnx.Rngs(params=0))
  seq, half = 600, 300
  # A row of one document, and one of two: the same positions again.
  positions = np.stack([np.arange(seq), np.tile(np.arange(half), 2)]).astype(np.int32)
  x, valid = jnp.zeros((2, seq, 16)), np.ones((2, seq), bool)
  valid[1, 500:] = False

  @functools.partial(jax.jit, static_argnames="training")
  def choose(layer, key, training):
    chosen, _ = depth(
      reshard(x, "batch", "seq", "act_embed"),
      *(reshard(jnp.asarray(a), "batch", "seq") for a in (positions, valid)),
      Pass(training, 0.3),
      layer=layer,
      key=key,
      places=180 if training else 600,
    )
    return chosen.slot_BT < chosen.index_BC.shape[1]

  went = lambda *args: np.asarray(choose(*args))
  key = jax.random.key
  a, b = went(0, key(0), True), went(0, key(1), True)
  assert (a.sum(1) == 180).all() and (b.sum(1) == 180).all() and not a[1, 500:].any()
  together = int((a & b)[0].sum())
  # 600 * 0.3^2 = 54 tokens in both; standard deviation 5 (hypergeometric)
  assert 30 < together < 80 and 30 < int((a[0] & a[1]).sum()) < 80
  first, again, other = went(0, key(0), False), went(0, key(1), False), went(1, key(0), False)
  np.testing.assert_array_equal(first, again)
  np.testing.assert_array_equal(first[1, :200], first[1, half:500])
  np.testing.assert_array_equal(first[0, :half], first[1, :half])
  assert 140 < int(first[0].sum()) < 220  # 180, standard deviation 11
  assert 30 < int((first & other)[0].sum()) < 80


# The choice alone: x has unit RMS and its first element is the score.
WIDTH, ROWS = 8, 3


class Choice(NamedTuple):
  chosen: Any
  stats: Any
  taken: jax.Array
  put: jax.Array
  ids: jax.Array


@functools.cache
def chooser(training: bool, has_room: bool):
  cfg = tiny_config(SMALL | {"mod.routing": "learned", "model.d_model": WIDTH})
  depth = DepthRouter(cfg, numerics(cfg), nnx.Rngs(params=0))
  depth.weight[...] = jnp.eye(WIDTH)[0]
  depth.threshold[...], depth.updates[...] = jnp.float32(0.5), jnp.float32(1)
  rules = Pass(training, CAPACITY)

  @jax.jit
  def run(x, valid, room):
    x = reshard(x, "batch", "seq", "act_embed")
    valid = reshard(valid, "batch", "seq")
    positions = jnp.zeros_like(valid, jnp.int32)
    room = reshard(room, "batch") if has_room else None
    places = rules.places(SEQ)
    chosen, stats = depth(
      x, positions, valid, rules, layer=0, key=None, places=places, free_places_B=room
    )
    taken = chosen.take(x)
    ids = reshard(jnp.broadcast_to(jnp.arange(SEQ), valid.shape), "batch", "seq")
    return Choice(chosen, stats, taken, chosen.put(taken), chosen.take_ids(ids, -1))

  return run


@pytest.mark.parametrize(("training", "has_room"), [(True, False), (False, True)])
@hypothesis.settings(max_examples=20)
@hypothesis.given(
  levels=st.lists(st.integers(-1, 2), min_size=ROWS * SEQ, max_size=ROWS * SEQ),
  lengths=st.lists(st.integers(0, SEQ), min_size=ROWS, max_size=ROWS),
  room=st.lists(st.integers(0, SEQ), min_size=ROWS, max_size=ROWS),
)
def test_of_equal_scores_the_first_and_padding_never(training, has_room, levels, lengths, room):
  levels = np.array(levels, np.float32).reshape(ROWS, SEQ)
  x = np.zeros((ROWS, SEQ, WIDTH), np.float32)
  x[..., 0], x[..., 1] = levels, np.sqrt(WIDTH - levels**2)
  valid = np.arange(SEQ) < np.array(lengths)[:, None]
  with jax.set_mesh(make_test_mesh(1, 1, 1)):
    run = chooser(training, has_room)
    got = jax.tree.map(np.asarray, run(x, valid, np.array(room, np.int32)))
  places, overflow = PLACES[training], 0
  for b in range(ROWS):
    real = range(lengths[b])
    if training:
      wanted = sorted(sorted(real, key=lambda t: (-levels[b, t], t))[:places])
    else:
      wanted = [t for t in real if levels[b, t] > 0.5]
    want = wanted[: min(places, room[b]) if has_room else places]
    overflow += len(wanted) - len(want)
    np.testing.assert_array_equal(got.ids[b], want + [-1] * (places - len(want)))
    slot = np.full(SEQ, places)
    slot[want] = range(len(want))
    np.testing.assert_array_equal(got.chosen.slot_BT[b], slot)
    np.testing.assert_array_equal(got.chosen.filled_BC[b], np.arange(places) < len(want))
    np.testing.assert_array_equal(got.taken[b, : len(want)], x[b, want])
    assert not got.taken[b, len(want) :].any()
    gated = np.zeros_like(x[b])
    gated[want] = x[b, want] / (1 + np.exp(-levels[b, want]))[:, None]
    np.testing.assert_allclose(got.put[b], gated, 1e-5, 1e-6)
  assert got.stats.overflow == overflow
  assert got.stats.routed == np.sum(np.asarray(got.ids) >= 0) and got.stats.tokens == sum(lengths)


# The running quantile.


def test_running_quantile_against_numpy(mesh):
  cfg = tiny_config(SMALL | {"mod.routing": "learned", "mod.threshold_decay": 0.3})
  depth = DepthRouter(cfg, numerics(cfg), nnx.Rngs(params=0))
  chosen_stats = chooser(True, False)(
    np.ones((ROWS, SEQ, WIDTH), np.float32), np.ones((ROWS, SEQ), bool), np.zeros(ROWS, np.int32)
  ).stats
  rng = np.random.default_rng(0)
  value = count = 0.0
  capacities = [0.4] * 9 + [1.0] * 2 + [0.3] * 7 + [0.4] * 2
  for step, capacity in enumerate(capacities):
    rows = 0 if step in (4, 11) or capacity == 1.0 else int(rng.integers(1, 9))
    total = rows * rng.standard_normal()
    stats = chosen_stats._replace(threshold=jnp.float32(total), rows=jnp.float32(rows))
    buffers = depth.updated(stats, capacity)
    for name, array in buffers.items():
      getattr(depth, name)[...] = array
    if step and capacity != capacities[step - 1]:
      count = 0
    if rows:  # decay rises with the number of updates, up to 0.3
      decay = min(0.3, count / (count + 9))
      value, count = decay * value + (1 - decay) * total / rows, count + 1
    np.testing.assert_allclose(buffers["threshold"], value, 1e-5, 1e-6)
    assert buffers["updates"] == count and buffers["capacity"] == np.float32(capacity)
  assert count == 2


def test_before_the_first_update_all_go_as_far_as_there_are_places(mesh):
  cfg = tiny_config(SMALL | {"mod.routing": "learned"})
  block = make_block(cfg, dtype="float32")
  x = np.random.default_rng(0).standard_normal((*SEGMENTS.shape, 16)).astype(np.float32)
  rules = Pass(False, CAPACITY)
  _, stats, went = jax.jit(lambda b: call(b, x, cfg, rules))(block)
  np.testing.assert_array_equal(went, VALID & (np.arange(SEQ) < rules.places(SEQ)))
  assert stats.overflow == (VALID.sum(1) - rules.places(SEQ)).clip(0).sum() > 0
