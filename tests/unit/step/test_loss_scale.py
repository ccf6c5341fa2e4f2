"""Training in float16: the scale of the loss, updates that overflow, and what others see."""

import dataclasses
import functools

import canonical
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal

from ats_jax.config.schema.precision import Dynamic, Static
from ats_jax.sharding.mesh import batch_sharding, make_mesh, on_mesh
from ats_jax.step.core import sums_and_grads
from ats_jax.step.loss_scale import LARGEST, MOST_SKIPPED, LossScale
from ats_jax.step.objective import batch_totals
from ats_jax.step.program import make_program
from lab.faults.inject import Fault, with_faults

HALF = {"precision.compute_dtype": "float16"}
LOW = {"precision.loss_scale": {"name": "dynamic", "initial": 256.0, "growth_interval": 4}}
OVERFLOW = Fault(*map(jnp.float32, (jnp.inf, 1.0, 1.0)))
NONE = Fault(*map(jnp.float32, (1.0, 1.0, 1.0)))


def config(kind="dense", mode="off", **changes):
  return canonical.config(kind, HALF | {"num_steps": 200, "orchestrator.mode": mode} | changes)


@functools.cache
def faulty(cfg):
  return with_faults(canonical.program(cfg))


def train(cfg, steps, overflows=(), state=None, first=0):
  """The state after some steps, and the metrics of each."""
  program, seen = faulty(cfg), []
  state = canonical.state(cfg) if state is None else canonical.copied(state)
  rng = np.random.default_rng(0)
  batches = [canonical.text_rows(cfg, rng) for _ in range(first + steps)]
  for step in range(first, first + steps):
    fault = OVERFLOW if step in overflows else NONE
    with jax.set_mesh(canonical.mesh()):
      state, metrics = program.train_step(
        state, batches[step], program.training_rules(1), fault=fault
      )
    seen.append(metrics.on_host())
  return state, seen


@jax.jit
def advance(scale, norm, loss):
  return scale.advance(Dynamic(initial=8.0, growth_interval=3, least=2.0), norm, loss)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.lists(st.sampled_from(["good", "overflow", "broken"]), max_size=60))
def test_a_scale_is_halved_by_an_overflow_and_doubled_after_an_interval(events):
  scale, want, good, row, skipped = LossScale.new(8.0), 8.0, 0, 0, 0
  for event in events:
    norm, loss = (1.0 if event == "good" else np.inf), (np.nan if event == "broken" else 1.0)
    scale = advance(scale, jnp.float32(norm), jnp.float32(loss))
    if event == "overflow" and row < MOST_SKIPPED:
      want, skipped = max(want / 2, 2.0), skipped + 1
    good, row = (good + 1, 0) if event == "good" else (0, row + 1)
    if good == 3:
      want, good = min(2 * want, LARGEST), 0
    assert [float(x) for x in scale] == [want, good, row, skipped]


def test_a_static_scale_stays():
  scale = LossScale.new(4.0).advance(Static(scale=4.0), jnp.float32(np.inf), jnp.float32(1.0))
  assert [float(x) for x in scale] == [4.0, 0, 1, 1]


@pytest.mark.parametrize(
  ("kind", "attention"),
  [("dense", "xla"), ("experts", "xla"), ("depths", "xla"), ("window", "chunked")],
)
def test_gradients_in_float16_are_those_in_float32_but_for_rounding(kind, attention):
  grads = {}
  for dtype in ("float32", "float16"):
    kernels = {"ops.kernels": {"attention": attention}}
    cfg = canonical.config(kind, {"precision.compute_dtype": dtype} | kernels)
    program, rows = canonical.program(cfg), canonical.rows(cfg)
    rules = program.training_rules(1)

    @jax.jit
    def of(model, rows, key, rules=rules, program=program, dtype=dtype):
      scale = jnp.float32(1024.0) if dtype == "float16" else None
      totals = batch_totals(rows, rules)._replace(scale=scale)
      return sums_and_grads(program.objective, model, rows, totals, key, rules)[2]

    with jax.set_mesh(canonical.mesh()):
      found = of(canonical.state(cfg).model, rows, jax.random.key(0))
    by = 1024.0 if dtype == "float16" else 1.0
    grads[dtype] = [np.asarray(g, np.float64) / by for g in jax.tree.leaves(found)]
  for got, want in zip(grads["float16"], grads["float32"], strict=True):
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want) + 1e-7


@pytest.mark.parametrize("mode", ["off", "act"])
def test_an_update_that_overflows_changes_nothing_but_the_scale(mode):
  cfg = config(mode=mode, **LOW | {"optimizer.ema_decay": 0.9})
  before, _ = train(cfg, 2)
  after, (seen,) = train(cfg, 1, {2}, before, first=2)
  kept = lambda s: (s.model, s.opt_state, s.ema)
  assert_trees_equal(kept(after), kept(before))
  assert int(after.step) == 3 and float(after.loss_scale.scale) == 128.0
  assert seen["train/skipped"] == 1.0 and seen["train/skipped_updates"] == 1.0
  assert seen["train/loss_scale_change"] == 0.5 and not np.isfinite(seen["train/grad_norm"])
  # The reflex takes it for no fault, then or later.
  _, later = train(cfg, 2, (), after, first=3)
  for row in (seen, *later):
    quiet = {"skipped": 0.0, "broken": 0.0, "wrong": 0.0, "miscounted": 0.0, "grad_scale": 1.0}
    assert all(row.get(f"reflex/{name}", value) == value for name, value in quiet.items())
  assert later[-1]["train/skipped_updates"] == 1.0


def test_what_is_still_not_finite_in_the_end_is_no_matter_of_the_scale():
  cfg = config(mode="act", **LOW)
  begun, _ = train(cfg, 1)
  row = begun.loss_scale._replace(in_a_row=jnp.int32(MOST_SKIPPED))
  _, (seen,) = train(cfg, 1, {1}, dataclasses.replace(begun, loss_scale=row), first=1)
  assert seen["train/skipped"] == 0.0 and seen["reflex/skipped"] == 1.0
  assert seen["reflex/broken"] == 1.0


def test_ten_overflows_leave_the_loss_where_it_would_be():
  cfg = config(**LOW | {"optimizer.schedule": "constant"})
  planted = {2, 3, 4, 20, 21, 40, 41, 42, 43, 60}
  _, clean = train(cfg, 90)
  _, hit = train(cfg, 90, planted)
  assert sum(row["train/skipped"] for row in hit) == len(planted)
  end = lambda rows: np.mean([row["train/loss"] for row in rows[-10:]])
  assert clean[0]["train/loss"] - end(clean) > 0.5
  assert abs(end(hit) - end(clean)) < 0.1 * (clean[0]["train/loss"] - end(clean))


def test_a_static_scale_changes_no_gradient_beyond_rounding():
  norm = {}
  for scale in (1.0, 1024.0):
    cfg = config(**{"precision.loss_scale": {"name": "static", "scale": scale}})
    _, (seen,) = train(cfg, 1)
    norm[scale] = seen["train/grad_norm"]
  wide, (seen,) = train(canonical.config("dense", {"num_steps": 200}), 1)
  assert wide.loss_scale is None and "train/loss_scale" not in seen
  assert norm[1024.0] == pytest.approx(seen["train/grad_norm"], rel=2e-3)
  assert abs(norm[1024.0] - seen["train/grad_norm"]) <= abs(norm[1.0] - seen["train/grad_norm"])


@pytest.mark.mesh
@pytest.mark.parametrize(
  ("axes", "changes"),
  [
    ({"fsdp": 2, "tensor": 2}, {"step.accum_steps": 2}),
    ({"data": 2, "fsdp": 2}, {"mesh.compress_gradients": "fp8", "mesh.zero": 1}),
    ({"stage": 2, "data": 2}, {"step.accum_steps": 2}),
  ],
  ids=str,
)
def test_a_mesh_scales_and_skips_as_one_device(axes, changes):
  of_mesh = {f"mesh.{axis}": size for axis, size in axes.items()}
  wide = {"data.batch_size": 8}
  found = []
  for more, devices in ((wide | {"step.accum_steps": changes.get("step.accum_steps", 1)}, 1), (
    wide | of_mesh | changes, 4
  )):  # fmt: skip
    cfg, seen = config(**LOW | more), []
    mesh = make_mesh(cfg, jax.devices()[:devices])
    with on_mesh(cfg, mesh):
      program = with_faults(make_program(cfg))
      state, rules = program.init(), program.training_rules(1)
      for step in range(6):
        fault = OVERFLOW if step == 1 else NONE
        rows = jax.device_put(canonical.rows(cfg, step), batch_sharding(mesh, 3))
        state, metrics = program.train_step(state, rows, rules, fault=fault)
        seen.append(metrics.on_host())
    found.append((seen, [np.asarray(x) for x in jax.tree.leaves(state.loss_scale)]))
  (one, scale), (several, scale_of_several) = found
  assert scale[0] == 256.0 and scale[3] == 1  # halved, and doubled after four
  assert_trees_equal(scale_of_several, scale)
  for a, b in zip(one, several, strict=True):
    assert a["train/skipped"] == b["train/skipped"]
    assert a["train/loss"] == pytest.approx(b["train/loss"], abs=5e-3)


def test_a_run_without_float16_has_no_part():
  cfg = canonical.config("dense", {"precision.compute_dtype": "bfloat16"})
  assert cfg.precision.scaling is None and canonical.state(cfg).loss_scale is None
