"""Gradients in 8 bits between replicas (`mesh.compress_gradients`)."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from absl import logging
from collectives import collectives, compiled_step
from equality import ACCUM, CFG
from helpers import counting_rows, make_test_mesh, micro_batches, named_leaves, tiny_config

from ats_jax.checkpoint import CheckpointManager, abstract_like
from ats_jax.config.schema import CheckpointConfig
from ats_jax.model.layout import stacks
from ats_jax.sharding.compressed import BLOCK, FORMAT_MAX, sum_over_replicas
from ats_jax.sharding.mesh import on_mesh, to_global
from ats_jax.step.program import make_program

REPLICAS, FSDP = 4, 2
LEAST = 2.0**-9 / FORMAT_MAX  # step of the format, in relation to the largest value of a block
SHAPE = (3, REPLICAS, 4, 200)  # a stack; no whole number of blocks
CUT = jax.P(None, "data", "fsdp", None)
FP8 = {"mesh.compress_gradients": "fp8"}


@pytest.fixture
def replicas():
  """A mesh of four replicas, each on two devices."""
  mesh = make_test_mesh(REPLICAS, FSDP, 1)
  with jax.set_mesh(mesh):
    yield mesh


@jax.jit
def reduced(parts, unsent):
  return sum_over_replicas(parts, unsent, dim=1)


def placed(x, mesh, cut=CUT):
  return jax.device_put(np.asarray(x, np.float32), jax.NamedSharding(mesh, cut))


def bits_by_replica(x: jax.Array) -> list[set[bytes]]:
  """For each part of an array, what the devices that hold it have there."""
  found: dict[str, set[bytes]] = {}
  for shard in x.addressable_shards:
    found.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
  return list(found.values())


def test_all_sums_and_what_is_unsent_are_all_parts(replicas):
  rng = np.random.default_rng(0)
  unsent, parts, sums = placed(np.zeros(SHAPE), replicas), 0.0, 0.0
  for _ in range(5):
    part = rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-4, 4, (3, 1, 4, 1))
    total, unsent = reduced(placed(part, replicas), unsent)
    assert total.sharding.spec == jax.P(None, "fsdp", None) and unsent.sharding.spec == CUT
    assert all(len(bits) == 1 for bits in bits_by_replica(total))
    parts, sums = parts + part.astype(np.float32).astype(np.float64), sums + np.float64(total)
  owed = np.float64(unsent).sum(axis=1)
  np.testing.assert_allclose(sums + owed, parts.sum(axis=1), rtol=1e-4, atol=1e-5 * parts.max())
  assert np.abs(owed).max() > 1e-4 * parts.max()  # there is something to feed back


def test_rounding_is_no_bias_with_feedback_only(replicas):
  """Tiny values beside a large one are never sent without it, and others always alike off."""
  tiny, steps = 1e-6, 40
  assert tiny < 0.5 * LEAST  # of the largest
  part = np.full(SHAPE, tiny)
  part[..., ::100], part[..., 1::100] = 1.0, 0.555  # in each block
  nothing = placed(np.zeros(SHAPE), replicas)
  unsent, fed_back, at_once = nothing, 0.0, 0.0
  for _ in range(steps):
    total, unsent = reduced(placed(part, replicas), unsent)
    fed_back += np.float64(total)
    at_once += np.float64(reduced(placed(part, replicas), nothing)[0])
  due = steps * part.sum(axis=1)
  of_tiny = (due / steps < 0.1 * REPLICAS) & (due > 0)
  assert np.abs(at_once[of_tiny]).max() == 0.0 and fed_back[of_tiny].min() > 0.0
  assert fed_back[of_tiny].mean() == pytest.approx(steps * REPLICAS * tiny, rel=0.1)
  others = ~of_tiny & (due < 0.6 * steps * REPLICAS)
  nearest = 256 / FORMAT_MAX  # 0.555 * 448 lies between 240 and 256
  np.testing.assert_allclose(at_once[others], nearest / 0.555 * due[others], rtol=1e-5)
  # What is owed is a step of a replica and one of the sum.
  np.testing.assert_allclose(fed_back[others], due[others], rtol=2 / 16 / steps)


def test_what_is_not_finite_reaches_all_replicas(replicas):
  part = np.ones(SHAPE)
  part[1, 2, 3, 50] = np.inf  # of one replica
  total, _ = reduced(placed(part, replicas), placed(np.zeros(SHAPE), replicas))
  found = ~np.isfinite(np.asarray(total))
  assert found[1, 3, 50] and found.sum() <= BLOCK


TRAINING = {
  "data.batch_size": 8,
  "optimizer.learning_rate": 3e-3,
  "num_steps": 200,
  "orchestrator.mode": "act",
}


@functools.cache
def made(changes: tuple[tuple[str, Any], ...], shape: tuple[int, ...] = (2, 2, 1)):
  cfg = tiny_config(TRAINING | dict(changes))
  mesh = make_test_mesh(*shape)
  with on_mesh(cfg, mesh):
    return make_program(cfg), mesh


def steps(program, mesh, state, numbers, spoilt=()):
  """Updates on batches by number, in `spoilt` ones of which a replica sees a NaN."""
  losses = []
  for number in numbers:
    rows = dict(counting_rows(number))
    if number in spoilt:
      rows["loss_mask"] = rows["loss_mask"].copy()
      rows["loss_mask"][5, 3] = np.nan
    batch = to_global(micro_batches(rows, program.cfg.step.accum_steps), mesh)
    state, metrics = program.train_step(state, batch, program.training_rules(1))
    losses.append(float(metrics["train/loss"]))
  return state, losses


SENT = tuple(FP8.items())


def raw(tree: Any) -> dict[str, bytes]:
  typed = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  data = lambda x: jax.random.key_data(x) if typed(x) else x
  return {k: np.asarray(data(v)).tobytes() for k, v in named_leaves(tree).items()}


def saved(folder, program, state):
  with CheckpointManager(folder, CheckpointConfig(), None, stacks(program.cfg)) as manager:
    manager.save(2, state, {})


def restored(folder, program, mesh):
  with CheckpointManager(folder, CheckpointConfig(), None, stacks(program.cfg)) as manager:
    return manager.restore_latest(abstract_like(program.init(abstract=True), mesh))[1]


@pytest.mark.mesh
def test_a_run_goes_on_bit_for_bit_and_an_update_that_is_left_out_keeps_what_is_unsent(tmp_path):
  program, mesh = made(SENT)
  with on_mesh(program.cfg, mesh):
    state, _ = steps(program, mesh, program.init(), range(2))
    saved(tmp_path, program, state)
    before = raw((state.model, state.unsent))
    state, losses = steps(program, mesh, state, [2], spoilt=[2])
    assert np.isnan(losses[0]) and int(state.reflex.broken) == 1
    assert raw((state.model, state.unsent)) == before
    whole, losses = steps(program, mesh, state, [3])
    assert np.isfinite(losses[0]) and raw((whole.model, whole.unsent)) != before
    again = restored(tmp_path, program, mesh)
    again, _ = steps(program, mesh, again, [2], spoilt=[2])
    again, same = steps(program, mesh, again, [3])
    assert losses == same and raw(again) == raw(whole)


@pytest.mark.mesh
def test_what_is_unsent_begins_at_zero_on_another_mesh(tmp_path, caplog):
  caplog.set_level(logging.WARNING)
  program, mesh = made(SENT)
  with on_mesh(program.cfg, mesh):
    state, _ = steps(program, mesh, program.init(), range(2))
    saved(tmp_path / "sent", program, state)
    model = raw(state.model)
  assert any(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(state.unsent))

  other, more = made(SENT, (4, 1, 1))
  with on_mesh(other.cfg, more):
    found = restored(tmp_path / "sent", other, more)
    assert "`unsent` of checkpoint" in caplog.text and "begins at zero" in caplog.text
    assert raw(found.model) == model
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(found.unsent))
    shapes = lambda tree: [(x.shape, x.sharding) for x in jax.tree.leaves(tree)]
    assert shapes(found.unsent) == shapes(other.init().unsent)

  caplog.clear()
  plain, _ = made(())
  with on_mesh(plain.cfg, mesh):
    found = restored(tmp_path / "sent", plain, mesh)
    assert "is left out" in caplog.text and found.unsent is None and raw(found.model) == model
    saved(tmp_path / "plain", plain, found)
  caplog.clear()
  with on_mesh(program.cfg, mesh):
    found = restored(tmp_path / "plain", program, mesh)
    assert "begins at zero" in caplog.text and raw(found.model) == model
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(found.unsent))
    steps(program, mesh, found, [2])


def crosses(line: str, replica_size: int) -> bool:
  """Whether devices of several replicas take part together in a collective of HLO text."""
  if named := re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line):
    return "'data'" in named[1]
  if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
    groups = [list(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", listed[1])]
  else:
    cut = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert cut, line
    shape, of, order = (list(map(int, text.split(","))) if text else None for text in cut.groups())
    groups = np.arange(np.prod(of)).reshape(of).transpose(order).reshape(shape)
  return any(len({int(device) // replica_size for device in group}) > 1 for group in groups)


@pytest.mark.mesh
def test_large_gradients_go_between_replicas_in_8_bits_alone():
  """Once an update, behind the loop over micro-batches; else scalars and vectors."""
  cfg = tiny_config(CFG | {"step.accum_steps": ACCUM, "data.batch_size": 16} | FP8)
  mesh = make_test_mesh(2, 2, 2)
  with on_mesh(cfg, mesh):
    text = compiled_step(cfg, mesh).as_text()
  lines = [line for line in text.splitlines() if "replica_groups=" in line]
  crossing = [line for line in lines if crosses(line, mesh.size // 2)]
  assert 0 < len(crossing) < len(lines)
  found = collectives("%computation (x) {\n" + "\n".join(crossing))
  eight_bits = [c for c in found if c.arrays[0].dtype == "s8"]
  matrices = 9  # of a model of one segment: a stack of each kind
  assert [sum(c.kind == kind for c in eight_bits) for kind in ("all-to-all", "all-gather")] == [
    matrices, matrices,
  ]  # fmt: skip
  # Blocks to and from the one other replica, by both its devices along the other axes.
  assert all(len(c.arrays) == 2 for c in eight_bits if c.kind == "all-to-all")
  vector = 2 * cfg.model.d_model  # norms of both layers
  scales = [a for c in found if c.kind != "all-reduce" for a in c.arrays if a.dtype == "f32"]
  assert max(a.size for a in scales) <= 2 * 64 * 32 // BLOCK
  summed = [a for c in found if c.kind == "all-reduce" for a in c.arrays]
  assert summed and max(a.size for a in summed) <= vector
  assert not any("while/body" in c.op for c in found)
