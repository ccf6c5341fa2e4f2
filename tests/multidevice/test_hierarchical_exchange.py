"""Tokens once to each host and there to its devices: against a dense sum, in values and counts."""

import contextlib
import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from helpers import make_test_mesh

from ats_jax.ops.expert_exchange import ExpertCompute, host_capacity, run_experts
from ats_jax.ops.registry import XLA
from ats_jax.sharding.apply import island
from ats_jax.sharding.rules import use_plan

pytestmark = pytest.mark.compat

DEVICES, LOCAL, TOKENS, WIDTH = 8, 2, 6, 5
EXPERTS = DEVICES * LOCAL


class Case(NamedTuple):
  """What is static: one program each."""

  hosts: int
  choices: int
  factor: float = 1.0
  num_groups: int = 1
  top_groups: int = 1


class Batch(NamedTuple):
  """Tokens of all devices, experts, and a cotangent; float64."""

  x_ND: np.ndarray
  weight_NK: np.ndarray
  scale_XD: np.ndarray
  expert_NK: np.ndarray
  cotangent_ND: np.ndarray


def compute(x_MD, sizes_E, scale_ED):
  """An expert is a row of numbers that a token is multiplied by; not linear, to have a slope."""
  rows = x_MD.shape[0]
  scale_MD = jnp.repeat(scale_ED, sizes_E, axis=0, total_repeat_length=rows)
  return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes_E), jnp.tanh(x_MD * scale_MD), 0)


def local(case, x_ND, expert_NK, weight_NK, scale_ED):
  experts = ExpertCompute(compute, LOCAL, case.factor, XLA, case.num_groups, case.top_groups)
  y_ND, waiting = run_experts(x_ND, expert_NK, weight_NK, scale_ED, experts, "hierarchical")
  return y_ND, waiting[None]


@functools.cache
def program(case):
  """Outputs, choices that waited on each device, and gradients; to be called under a mesh."""
  rows = ("experts", None)
  f = island(functools.partial(local, case), in_axes=[rows] * 4, out_axes=(rows, ("experts",)))

  def objective(x_ND, weight_NK, scale_XD, expert_NK, cotangent_ND):
    y_ND, waiting = f(x_ND, expert_NK, weight_NK, scale_XD)
    return jnp.sum(y_ND * cotangent_ND), (y_ND, waiting)

  return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))


@contextlib.contextmanager
def on_devices(case):
  mesh, plan = make_test_mesh(1, 1, 1, DEVICES), use_plan("default", hosts=case.hosts)
  with jax.enable_x64(True), jax.set_mesh(mesh), plan:
    yield


def placed(batch):
  """The arguments of `program`, over the devices."""
  rows = jax.NamedSharding(jax.sharding.get_mesh(), jax.P("expert", None))
  return [jax.device_put(a, rows) for a in batch]


def spread(case, batch):
  """(outputs, choices that waited, gradients) over eight devices."""
  with on_devices(case):
    (_, (y_ND, waiting)), gradients = program(case)(*placed(batch))
    return np.array(y_ND), np.array(waiting), [np.array(g) for g in gradients]


def dense(batch):
  """(outputs, gradients) by numpy: all experts' rows of all tokens are there."""
  x_ND, weight_NK, scale_XD, expert_NK, cotangent_ND = batch
  is_there_NK1 = (expert_NK < EXPERTS)[..., None]
  scale_NKD = np.where(is_there_NK1, scale_XD[expert_NK % EXPERTS], 0.0)
  out_NKD = np.tanh(x_ND[:, None] * scale_NKD)
  slope_NKD = (1 - out_NKD**2) * cotangent_ND[:, None] * weight_NK[..., None]
  d_scale_XD = np.zeros_like(scale_XD)
  np.add.at(d_scale_XD, expert_NK % EXPERTS, slope_NKD * x_ND[:, None] * is_there_NK1)
  d_weight_NK = np.sum(out_NKD * cotangent_ND[:, None], axis=2)
  d_x_ND = np.sum(slope_NKD * scale_NKD, axis=1)
  return np.sum(out_NKD * weight_NK[..., None], axis=1), [d_x_ND, d_weight_NK, d_scale_XD]


def room_on_a_host(case):
  groups = case.num_groups, case.top_groups
  return host_capacity(TOKENS, case.choices, case.hosts, case.factor, *groups)


def waits(case, expert_NK):
  """By hand, for all devices together: choices beyond the room on a host, and on a device."""
  rows = room_on_a_host(case)
  room, late = int(np.ceil(case.factor * TOKENS * case.choices)), 0
  received = np.zeros(DEVICES, int)
  for tokens in expert_NK.reshape(DEVICES, TOKENS, -1):
    sent = np.zeros(case.hosts, int)
    for token in tokens:
      there = token[token < EXPERTS]
      for host in np.unique(there * case.hosts // EXPERTS):
        on_host = there[there * case.hosts // EXPERTS == host]
        sent[host] += 1  # once, however many of its experts are there
        if sent[host] > rows:
          late += len(on_host)
        else:
          np.add.at(received, on_host // LOCAL, 1)
  return late + np.maximum(received - room, 0).sum()


def batch_of(case, seed, popular, empty):
  """Random tokens, of which a share is padding; some experts are everybody's first choice."""
  rng, tokens = np.random.default_rng(seed), DEVICES * TOKENS
  score_NX = rng.standard_normal((tokens, EXPERTS))
  score_NX[:, rng.permutation(EXPERTS)[:popular]] += 9.0
  expert_NK = np.argsort(-score_NX, axis=1)[:, : case.choices].astype(np.int32)
  expert_NK[rng.random(tokens) < empty] = EXPERTS
  normal = lambda *shape: rng.standard_normal(shape)
  return Batch(
    normal(tokens, WIDTH),
    normal(tokens, case.choices),
    normal(EXPERTS, WIDTH),
    expert_NK,
    normal(tokens, WIDTH),
  )


def check(case, batch):
  y_ND, waiting, gradients = spread(case, batch)
  want_ND, want = dense(batch)
  np.testing.assert_allclose(y_ND, want_ND, 1e-12, 1e-12)
  for name, got, right in zip(("x", "weight", "scale"), gradients, want, strict=True):
    np.testing.assert_allclose(got, right, 1e-12, 1e-12, err_msg=name)
  assert waiting.sum() == waits(case, batch.expert_NK)
  return waiting


CASES = [
  Case(hosts=4, choices=3, num_groups=4, top_groups=2),
  Case(hosts=2, choices=2, factor=1.5),
  Case(hosts=8, choices=4),  # a device is a host
]


@pytest.mark.parametrize(
  "case", [CASES[0], *(pytest.param(c, marks=pytest.mark.mesh) for c in CASES[1:])], ids=str
)
@hypothesis.settings(max_examples=20)
@hypothesis.given(
  seed=st.integers(0, 2**16), popular=st.integers(0, 4), empty=st.sampled_from([0.0, 0.3, 1.0])
)
def test_it_is_the_dense_sum_and_counts_what_waits(case, seed, popular, empty):
  """Also of choices that keep to no group: these say how much room there is, and nothing else."""
  check(case, batch_of(case, seed, popular, empty))


def test_further_passes_between_hosts_and_within():
  """All tokens want the same experts of one host: more than there is room for, at both steps."""
  case = CASES[0]
  batch = batch_of(case, 0, 0, 0.0)._replace(
    expert_NK=np.tile(np.array([5, 4, 6], np.int32), (DEVICES * TOKENS, 1))
  )
  rows, room = room_on_a_host(case), TOKENS * 3
  assert rows == TOKENS // 2
  waiting = check(case, batch)
  late, first = TOKENS * 3 // 2, DEVICES * rows
  # Device 2 has experts 4 and 5, device 3 has expert 6.
  np.testing.assert_array_equal(waiting - late, [0, 0, 2 * first - room, first - room, 0, 0, 0, 0])


def test_nothing_but_blocks_of_tokens_crosses_between_hosts():
  """In the compiled program, forward and backward, in first passes and in further ones."""
  case, rows = CASES[0], TOKENS // 2
  with on_devices(case):
    found = collectives(program(case).lower(*placed(batch_of(case, 0, 0, 0.0))).compile().as_text())
  between, within = "{{0,2,4,6},{1,3,5,7}}", "{{0,1},{2,3},{4,5},{6,7}}"
  groups = {"all-to-all": between, "all-gather": within, "reduce-scatter": within}
  for one in found:
    if one.kind in groups:
      assert one.groups == groups[one.kind]
    else:  # rows of each device in each of two passes, and the objective
      assert one.kind == "all-reduce" and one.arrays[0].shape in ((2, DEVICES), ())
  crossing = [one for one in found if one.kind == "all-to-all"]
  # Tokens and their sums, and the gradients of both.
  of_tokens = [one for one in crossing if one.arrays[0].shape[-1] == WIDTH]
  assert {array.shape for one in of_tokens for array in one.arrays} == {(rows, WIDTH)}
  assert {len(one.arrays) for one in of_tokens} == {case.hosts}
  assert [one.in_loop for one in of_tokens].count(0) == 4
  # Experts, weights, and the gradient of the weights.
  others = [one for one in crossing if one not in of_tokens]
  assert {array.shape for one in others for array in one.arrays} == {(rows, case.choices)}
  assert [one.in_loop for one in others].count(0) == 3
  # A pass within a host moves nothing between hosts: there are loops in the loops.
  assert {one.in_loop for one in crossing} == {0, 1}
  assert {one.in_loop for one in found if one.kind == "all-gather"} == {0, 1, 2}
