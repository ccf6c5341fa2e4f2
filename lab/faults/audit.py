"""Scenarios of the audit: only what production can meet, through the doors that production has.

A1: a legitimate minority, from the first step on. A2: one flipped bit of what a run keeps. A3: a
schedule that is wrong. N2: changes that a user declares. A1 and N2 are controls. Nothing but the
place of a fault and the time at which it begins is drawn: the name says the rest.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from ats_jax.model.param import merge, params_of, trainable
from ats_jax.step.optimizers.base import per_parameter
from ats_jax.step.state import TrainState
from lab.faults.domains import DOMAINS
from lab.faults.scenarios import SCENARIOS, Draw, Inject, Injection, Rows, Scenario, clean

SHARD = 15  # batches of a minority in a row
SHORTEST = 400  # steps of a run: a shard is in it, though a small share has few of its batches
BITS = 32
COUNTERS = ("adam_steps", "step")
PLACES = ("weight", "mu", "nu", *COUNTERS)

# ---- A1: a legitimate minority


def minority(draw: Draw, step: int, rows: Rows, *, domain: str, by: str) -> Injection:
  """A share of all text is of another domain: whole batches, rows, or batches in a row."""
  size, share = rows["tokens"].shape[1], draw.severity
  if by == "batch":
    taken = np.full(size, draw.rng(step).random() < share)
  elif by == "row":
    taken = draw.rng(step).random(size) < share
  else:
    assert by == "shard", by
    length = min(SHARD, round(share * SHORTEST))
    period = round(length / share)
    first = draw.rng().integers(period - length + 1)
    taken = np.full(size, first <= step % period < first + length)
  if not taken.any():
    return Injection(rows, minority=taken)
  other = draw.other(domain, step)
  pick = lambda old, new: np.where(taken[:, None], new, old)
  return Injection({name: pick(rows[name], other[name]) for name in rows}, minority=taken)


def _minority(domain: str, by: str, share: float) -> Scenario:
  assert domain in DOMAINS, domain
  inject = functools.partial(minority, domain=domain, by=by)
  return Scenario("A1", (share, share, share), inject, domain=domain, begins=0)


# ---- A2: one bit


def flip(draw: Draw, step: int, rows: Rows, *, place: str, bit: int) -> Injection:
  """One bit flips, once: of a number in a matrix or in what Adam keeps of one, or of a count."""
  if step != draw.onset:
    return Injection(rows)
  return Injection(rows, state=lambda state: flipped(state, draw.rng(), place, bit))


def flipped(state: TrainState, rng: np.random.Generator, place: str, bit: int) -> TrainState:
  """`state` with one bit of `place` flipped, in an element that chance chooses."""
  if place == "step":
    return dataclasses.replace(state, step=_with_flip(state.step, 0, bit))
  if place == "weight":
    params = _flip_one(trainable(state.model), rng, bit)
    return dataclasses.replace(state, model=merge(params, state.model))
  if place == "adam_steps":
    is_count = lambda path, x: jax.tree_util.keystr(path).endswith(".steps")
    one = lambda path, x: _with_flip(x, 0, bit) if is_count(path, x) else x
    opt_state = jax.tree_util.tree_map_with_path(one, state.opt_state)
    return dataclasses.replace(state, opt_state=opt_state)
  (old,) = [tree for name, tree in per_parameter(state.opt_state) if name == place]
  new = _flip_one(old, rng, bit)
  swap = lambda tree: new if tree is old else tree
  opt_state = jax.tree.map(swap, state.opt_state, is_leaf=lambda tree: tree is old)
  return dataclasses.replace(state, opt_state=opt_state)


def _flip_one(tree: Any, rng: np.random.Generator, bit: int) -> Any:
  """`tree` with one bit of one of its matrices flipped."""
  matrices = [i for i, param in enumerate(params_of(tree)) if len(param.axes) > 1]
  which = rng.choice(matrices)
  leaves, structure = jax.tree.flatten(tree)
  leaves[which] = _with_flip(leaves[which], rng.integers(leaves[which].size), bit)
  return structure.unflatten(leaves)


def _with_flip(x: jax.Array, place: int, bit: int) -> jax.Array:
  array = np.array(x)
  array.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
  return jax.device_put(array, x.sharding)


# ---- A3: the schedule


def schedule(draw: Draw, step: int, rows: Rows, *, length: float) -> Injection:
  """The schedule's rate is multiplied for as many steps."""
  return Injection(rows, schedule=draw.severity if draw.within(step, length) else 1.0)


def _schedule(factor: float, length: float = np.inf, begins: int | None = None) -> Scenario:
  inject = functools.partial(schedule, length=length)
  return Scenario("A3", (factor, factor, factor), inject, "learning rate", begins=begins)


# ---- N2: what a user declares


def warm_restart(draw: Draw, step: int, rows: Rows) -> Injection:
  """A cosine that has fallen to a fifth of the rate at the onset, and begins anew there."""
  if step >= draw.onset:
    return Injection(rows)
  least = 1.0 / draw.severity
  factor = least + (1.0 - least) * 0.5 * (1.0 + np.cos(np.pi * step / draw.onset))
  return Injection(rows, schedule=float(factor))


def rows_doubled(draw: Draw, step: int, rows: Rows) -> Injection:
  """From the onset on, a batch has twice the rows."""
  if step < draw.onset:
    return Injection(rows)
  more = draw.other("main", step)
  return Injection({k: np.concatenate([v, more[k]], axis=1) for k, v in rows.items()})


def accumulation(draw: Draw, step: int, rows: Rows) -> Injection:
  """From the onset on, a batch comes in as many parts as the severity says."""
  if step < draw.onset:
    return Injection(rows)
  parts = int(draw.severity)
  return Injection({k: v.reshape(parts, -1, v.shape[-1]) for k, v in rows.items()})


def _control(inject: Inject, severity: float) -> Scenario:
  return Scenario("N2", (severity, severity, severity), inject)


def _flip(place: str, bit: int) -> Scenario:
  assert place in PLACES, place
  return Scenario("A2", (1, 1, 1), functools.partial(flip, place=place, bit=bit), "state")


SHARES = (1, 3, 10)  # per cent
AUDITED: dict[str, Scenario] = {
  **{
    f"minority_{by}_{share}": _minority("script", by, share / 100)
    for by in ("batch", "row", "shard")
    for share in SHARES
  },
  "minority_shard_25": _minority("script", "shard", 0.25),
  "base64_batch_8": _minority("base64", "batch", 0.08),
  "base64_row_8": _minority("base64", "row", 0.08),
  **{f"flip_{place}_b{bit}": _flip(place, bit) for place in PLACES for bit in range(BITS)},
  **{
    f"schedule_x{factor}_{name}": _schedule(factor, **more)
    for factor in (10, 30)
    for name, more in (("forever", {}), ("burst", {"length": 30}), ("from_0", {"begins": 0}))
  },
  "warm_restart": _control(warm_restart, 5.0),
  "rows_doubled": _control(rows_doubled, 2),
  "accumulation": _control(accumulation, 2),
  "long_clean": _control(clean, 0),
}
KNOWN = SCENARIOS | AUDITED
