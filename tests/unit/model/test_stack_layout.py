"""Which layers are sparse, how the stack is cut into scans, and that the cut changes nothing."""

from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, make_decoder, random_rows, tiny_config

from ats_jax.model.block import TokenContext
from ats_jax.model.forward_pass import Pass
from ats_jax.model.fp8 import fp8_layers
from ats_jax.model.layer_kinds import LayerKind, layer_kinds
from ats_jax.model.layout import Segment, mod_tokens, segments
from ats_jax.model.stats import by_layer
from ats_jax.ops.embedding import embedding_lookup
from ats_jax.ops.rope import rope_table
from ats_jax.sharding.apply import reshard

# Both sides run the same float32 operations; a scan may fuse them in another way.
RTOL, ATOL = 1e-5, 1e-5
LETTERS = {
  ".": LayerKind(moe=False, mod=False),
  "e": LayerKind(moe=True, mod=False),
  "d": LayerKind(moe=False, mod=True),
  "b": LayerKind(moe=True, mod=True),
}
kinds_of = lambda text: tuple(map(LETTERS.__getitem__, text))
text_of = lambda kinds: "".join(next(k for k, v in LETTERS.items() if v == kind) for kind in kinds)
PLACES = ("positions", "segment_ids")
FP8 = {"precision.fp8": True}
MOE, MOD = {"moe.num_experts": 4}, {"mod.routing": "learned"}


@pytest.mark.parametrize(
  ("layers", "changes", "want"),
  [
    (5, MOE | {"moe.every": 2}, ".e.e."),
    (7, MOE | {"moe.every": 3}, "..e..e."),
    (6, MOE | {"moe.dense_first": 1, "moe.dense_last": 2}, ".eee.."),
    (7, MOE | {"moe.dense_first": 2, "moe.every": 2, "moe.dense_last": 1}, "...e.e."),
    (5, MOD, ".d.d."),
    (6, MOD | {"mod.every": 1, "mod.start_layer": 1, "mod.end_layer": 4}, ".ddd.."),
    (8, MOD | {"mod.every": 3, "mod.start_layer": 2, "mod.end_layer": 7}, "....d..."),
    (8, MOE | MOD | {"moe.dense_first": 1}, ".bebebeb"),
    (6, MOE | MOD | {"moe.every": 2, "mod.every": 3}, ".ede.b"),
  ],
)
def test_layer_kinds(layers, changes, want):
  assert text_of(layer_kinds(tiny_config({"model.num_layers": layers} | changes))) == want


@pytest.mark.parametrize(
  ("layers", "changes", "want"),
  [
    (5, {}, "....."),
    (5, FP8, ".888."),
    (5, FP8 | {"precision.fp8_keep_first": 0, "precision.fp8_keep_last": 3}, "88..."),
    (6, FP8 | MOE | MOD | {"moe.every": 2, "mod.every": 3}, ".8.88."),  # the third and last skip
  ],
)
def test_layers_in_8_bits_have_the_same_kinds(layers, changes, want):
  cfg = tiny_config({"model.num_layers": layers} | changes)
  assert "".join(".8"[fp8] for fp8 in fp8_layers(cfg)) == want
  plain = {name: value for name, value in changes.items() if "fp8" not in name}
  wide = tiny_config({"model.num_layers": layers} | plain)
  assert layer_kinds(cfg) == layer_kinds(wide)


@pytest.mark.parametrize(
  ("text", "want"),
  [
    ("....", [(0, ".", 4)]),
    (".d.d.", [(0, ".d", 2), (4, ".", 1)]),
    ("..eeee.", [(0, ".", 2), (2, "e", 4), (6, ".", 1)]),
    (".bebebeb", [(0, ".", 1), (1, "be", 3), (7, "b", 1)]),
    ("..d..d", [(0, "..d", 2)]),
    (".ed", [(0, ".", 1), (1, "e", 1), (2, "d", 1)]),
  ],
)
def test_segments(text, want):
  assert segments(kinds_of(text)) == tuple(Segment(f, kinds_of(k), r) for f, k, r in want)


any_layers = st.text(".edb", min_size=1, max_size=12)


@hypothesis.given(any_layers)
def test_segments_hold_every_layer_once_and_in_order(text):
  found = segments(kinds_of(text))
  assert text_of([k for s in found for k in s.kinds * s.repeats]) == text
  indices = []
  for segment in found:
    assert segment.first == len(indices)
    by_place = [segment.layer_indices(place) for place in range(len(segment.kinds))]
    assert all(len(of_place) == segment.repeats for of_place in by_place)
    indices += [int(i) for i in np.array(by_place).T.reshape(-1)]  # super-block by super-block
    for kind, of_place in zip(segment.kinds, by_place, strict=True):
      assert {text[i] for i in of_place} == {text_of([kind])}
  assert indices == list(range(len(text)))


def _program_size(cfg, rows) -> int:
  """Operations that XLA is given."""

  def run(model):
    positions, ids = rows["positions"], rows["segment_ids"]
    rules = Pass(training=True, capacity=0.25)
    return model(rows["tokens"], positions_BT=positions, segment_ids_BT=ids, rules=rules)

  model = jax.eval_shape(lambda: make_decoder(cfg))
  return jax.jit(run).lower(model).as_text().count("stablehlo.")


def test_the_program_does_not_grow_with_depth(mesh):
  sizes = {}
  for layers in (4, 12):
    cfg = tiny_config(MOE | MOD | {"moe.every": 2, "model.num_layers": layers})
    sizes[layers] = _program_size(cfg, random_rows(cfg, 2))
  assert sizes[4] == sizes[12]


def test_segments_give_what_the_layers_give_one_by_one(mesh):
  cfg = tiny_config(
    MOE | MOD | {"model.num_layers": 5, "moe.dense_first": 4, "model.init_std": 0.2}
  )
  rows, rules = random_rows(cfg, 4, seed=3), Pass(True, 0.5)
  model = jax.jit(lambda: make_decoder(cfg))()
  assert [(text_of(s.kinds), s.repeats) for s in model.layout] == [(".d", 2), ("e", 1)]
  positions, ids = (reshard(jnp.asarray(rows[n]), "batch", "seq") for n in PLACES)
  # of each layer: segment, place in the super-block, repeat
  at = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)]

  @jax.jit
  def whole(model):
    return model(rows["tokens"], positions_BT=positions, segment_ids_BT=ids, rules=rules)

  @jax.jit
  def one_by_one(model):
    table = rope_table(positions, cfg.model.head_dim, cfg.model.rope_theta)
    weight = model.embed.weight[...]
    x = embedding_lookup(weight, rows["tokens"], jnp.float32, deterministic=False)
    depth, stats = 0, []
    for index, (segment, place, repeat) in enumerate(at):
      layer = jax.tree.map(lambda a, r=repeat: a[r], model.segments[segment].layers[place])
      context = TokenContext(positions, ids, table)
      x, of_layer, went, _ = layer(x, context, rules, layer=jnp.int32(index))
      stats.append(of_layer)
      depth += went * (layer.depth is not None)
    return model.final_norm(x), depth, stats

  want, depth, stats = jax.tree.map(np.asarray, one_by_one(model))
  got, got_stats = jax.tree.map(np.asarray, whole(model))
  np.testing.assert_allclose(got, want, RTOL, ATOL)
  np.testing.assert_array_equal(
    got_stats.depth_L, np.bincount(depth[rows["segment_ids"] > 0], minlength=3)
  )
  for want, (segment, place, repeat) in zip(stats, at, strict=True):
    here = jax.tree.map(lambda a, r=repeat: a[r], got_stats.segments[segment][place])
    assert_trees_close(here, want, rtol=RTOL, atol=ATOL)
  # The layers that skip tokens and those with experts, from the bottom up.
  for part, indices in (("mod", [1, 3]), ("moe", [4])):
    stacked = by_layer(got_stats, model.layout, part)
    wanted = jax.tree.map(lambda *a: np.stack(a), *(getattr(stats[i], part) for i in indices))
    assert_trees_close(stacked, wanted, rtol=RTOL, atol=ATOL)


@hypothesis.given(st.integers(1, 1000), st.integers(1, 5000))
def test_places_are_the_share_rounded_up(thousandths, seq):
  want = -(-Fraction(thousandths, 1000) * seq // 1)
  assert mod_tokens(thousandths / 1000, seq) == want
  slack = min(Fraction(1), Fraction(5, 4) * Fraction(thousandths, 1000))
  assert Pass(False, thousandths / 1000).places(seq) == -(-slack * seq // 1)
  assert Pass(True, thousandths / 1000).places(seq) == want


def test_places_of_a_row():
  assert [Pass(True, 0.125, 64).places(n) for n in (8, 40, 64)] == [1, 5, 8]
  # Under the causal rule a quarter more, and no fewer in a shorter row than in one of 64.
  assert [Pass(False, 0.125, 64).places(n) for n in (8, 40, 64, 128)] == [8, 10, 10, 20]
  assert Pass(False, 0.9, 64).places(64) == 64
