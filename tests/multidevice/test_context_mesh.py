"""Rows cut along their positions: losses, gradients and scores of one device."""

import functools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import Collective, collectives, compiled_step
from equality import CFG, KINDS, MOD, ROWS, RTOL, assert_equal, assert_lies_still, mesh_of, run
from helpers import make_decoder, named_leaves, pack, tiny_config, when
from processes import run_job

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config.schema import CheckpointConfig, SampleConfig
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.inference.generator import generate_tokens
from ats_jax.model.layout import stacks
from ats_jax.ops.attention.along_row import WHOLE_ROWS
from ats_jax.ops.attention.causal import attention
from ats_jax.ops.attention.ulysses import Ulysses
from ats_jax.sharding.mesh import on_mesh
from ats_jax.step.program import make_program

CASES = [
  ("dense", {"context": 2}),  # key/value heads divide
  ("dense", {"context": 2, "tensor": 2}),  # the one of a device is sent to two
  ("dense", {"context": 2, "fsdp": 2, "data": 2}),
  ("dense", {"context": 2, "stage": 2}),
  ("latent", {"context": 2}),
  ("moe", {"context": 2, "expert": 2}),
  ("mod", {"context": 4, "fsdp": 2}),
  ("hybrid", {"context": 2, "expert": 2}),
]


@pytest.mark.parametrize(
  ("kind", "sizes"),
  [pytest.param(*c, marks=when(i, quick=(2,), ci=(3, 5, 6, 7))) for i, c in enumerate(CASES)],
  ids=str,
)
def test_a_cut_row_computes_what_a_whole_one_does(kind, sizes):
  many, one = run(kind, *sizes.items()), run(kind)
  assert_equal(many, one)
  assert_lies_still(many)
  read = [s.spec for name, s in many.of_model().items() if ".attn.out." in name or "embed" in name]
  assert len(read) > 1 and all("context" in str(spec) for spec in read)  # ZeRO over it too


OP_MESHES = [{"context": 2}, {"context": 4}, {"context": 2, "tensor": 2}]


@functools.cache
def of_attention(kv_heads: int, *sizes: tuple[str, int]) -> list[np.ndarray]:
  """Value and gradients of the op: two rows, windows, a soft cap, sinks, narrow values."""
  rng, (batch, seq, heads, width) = np.random.default_rng(kv_heads), (2, 16, 4, 8)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k = normal(batch, seq, heads, width), normal(batch, seq, kv_heads, width)
  v, sinks, dy = normal(batch, seq, kv_heads, 6), normal(heads), normal(batch, seq, heads, 6)
  segments, _ = pack([[7, 6], [3, 13]], seq)
  how = {"max_segments": 3, "window": 7, "soft_cap": 2.0}

  def loss(q, k, v, sinks):
    along_row = Ulysses() if sizes else WHOLE_ROWS
    y = attention(q, k, v, segment_ids_BT=segments, sinks_N=sinks, along_row=along_row, **how)
    return jnp.sum(y * dy), y

  with jax.set_mesh(mesh_of(dict(sizes))):
    grads, y = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
  return [np.asarray(a) for a in (y, *grads)]


@pytest.mark.compat
@pytest.mark.parametrize("sizes", OP_MESHES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_equals_one_device(kv_heads, sizes):
  if kv_heads % sizes.get("tensor", 1):
    return  # refused by the config
  one, many = of_attention(kv_heads), of_attention(kv_heads, *sizes.items())
  for got, want in zip(many, one, strict=True):
    np.testing.assert_allclose(got, want, RTOL, 1e-6)
    assert np.abs(want).max() > 0.1


def test_too_few_heads_are_refused_by_the_op():
  q = np.zeros((2, 18, 4, 8), np.float32)
  ids = np.ones((2, 18), np.int32)
  with (
    jax.set_mesh(mesh_of({"context": 3})),
    pytest.raises(ValueError, match=r"over 3 devices, .* divide the 4 heads .* mesh.context"),
  ):
    attention(q, q, q, segment_ids_BT=ids, max_segments=1, along_row=Ulysses())


SMALL = 256  # bytes: metrics and norms
WEIGHTS, WIDTH = 7, 32  # matrices of a layer; of an activation


@functools.cache
def found(remat: str) -> list[Collective]:
  changes = {"step.accum_steps": 1, "step.remat": remat, "model.num_layers": 3}
  cfg, mesh = tiny_config(CFG | changes), mesh_of({"context": 2})
  with on_mesh(cfg, mesh):
    every = collectives(compiled_step(cfg, mesh).as_text())
  return [c for c in every if c.bytes > SMALL]


@pytest.mark.parametrize(
  ("remat", "again"),
  [
    ("none", 0),
    ("qkv", 1),
    pytest.param("names", 1, marks=pytest.mark.mesh),
    pytest.param("attention", 4, marks=pytest.mark.mesh),
  ],
)
def test_a_layer_swaps_four_arrays_each_way_and_gathers_no_activations(remat, again):
  """Queries, keys, values and the output; the forward swaps again what remat does not keep."""
  every = found(remat)
  kinds = {c.kind for c in every}
  swaps = [c for c in every if c.kind == "all-to-all" and c.in_loop]
  assert len(swaps) == 8 + again
  # Gradients are summed, of a layer in the loop: nothing of a stack or of tokens.
  # Weights are gathered there, twice; before it the head, ids of segments and of tokens.
  gathered = [(a.size, c.in_loop) for c in every if c.kind == "all-gather" for a in c.arrays]
  assert Counter(in_loop for _, in_loop in gathered) == {0: 3, 1: 2 * WEIGHTS}
  assert max(size for size, _ in gathered) < ROWS * 16 * WIDTH
  assert kinds == {"all-to-all", "all-gather", "all-reduce", "reduce-scatter"}
  summed = {a.shape for c in every if c.kind == "all-reduce" for a in c.arrays}
  assert not any(ROWS in shape[:1] for shape in summed)


@pytest.mark.mesh
def test_a_checkpoint_goes_from_cut_rows_to_one_device_and_back(tmp_path):
  cfg = tiny_config(CFG | KINDS["dense"])

  def through(sizes, step):
    mesh = mesh_of(sizes)
    with (
      on_mesh(cfg, mesh),
      CheckpointManager(tmp_path, CheckpointConfig(), None, stacks(cfg)) as manager,
    ):
      program = make_program(cfg)
      state = program.init()
      if step:
        abstract = abstract_like(program.init(abstract=True), mesh)
        number, state, _ = manager.restore_latest(abstract)
        assert number == step
      manager.save(step + 1, state, {})
      manager.wait()
      return {k: np.asarray(v) for k, v in named_leaves(state.model).items()}

  first = through({"context": 2, "fsdp": 2}, 0)
  for step, sizes in enumerate(({}, {"context": 4, "data": 2}), 1):
    now = through(sizes, step)
    for name, value in first.items():
      np.testing.assert_array_equal(now[name], value, err_msg=name)


@pytest.mark.mesh
@pytest.mark.slow
def test_a_text_is_that_of_one_device():
  """Each token is one position, which nothing can cut: rows are whole while a text is drawn."""
  cfg, texts = tiny_config(CFG | MOD | {"model.vocab_size": 384}), []
  sampling = SampleConfig(max_tokens=8, temperature=0.9)
  for sizes in ({}, {"context": 2}):
    with on_mesh(cfg, mesh_of(sizes)):
      rules = make_program(cfg).rules(cfg.num_steps)
      how = {"rules": rules, "prompt": "some prompt", "seed": 3}
      texts.append(list(generate_tokens(make_decoder(cfg), ByteTokenizer(), sampling, **how)))
  assert texts[0] == texts[1] and len(set(texts[0])) > 3


PROCESS = """
import numpy as np
from ats_jax.sharding.mesh import local_rows, to_global
sys.path.insert(0, argv[0])
from helpers import make_test_mesh

mesh = make_test_mesh(1, 1, 1, context=4)
with jax.set_mesh(mesh):
  rows = np.arange(2 * 4 * 8, dtype=np.int32).reshape(2, 4, 8)
  assert local_rows(mesh, 4).tolist() == [0, 1, 2, 3]
  x = to_global({"tokens": rows}, mesh)["tokens"]
  assert x.shape == rows.shape
  for shard in x.addressable_shards:
    assert shard.data.shape == (2, 4, 2)
    np.testing.assert_array_equal(shard.data, rows[shard.index])
  say(str(sorted(s.index[2].start or 0 for s in x.addressable_shards)))
"""


@pytest.mark.mesh
def test_processes_along_a_row_take_their_own_positions(tmp_path):
  folder = Path(__file__).parents[1]
  assert run_job(PROCESS, tmp_path, folder, devices=2) == [["[0, 2]"], ["[4, 6]"]]
