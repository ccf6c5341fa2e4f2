"""Which rows go where when devices exchange them with experts, by the rules that jax states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_test_mesh

from ats_jax.ops.expert_exchange import host_room, routes
from ats_jax.sharding.ragged import Routes, ragged_exchange
from ats_jax.sharding.rules import spec

DEVICES, EXPERTS, WIDTH = 4, 3, 2


def sizes_of(seed, most=5):
  """Rows of each device for each expert; some have none."""
  return (
    np.random.default_rng(seed).integers(0, most, (DEVICES, DEVICES * EXPERTS)).astype(np.int32)
  )


def exchanged(operands, all_routes, rows):
  """`jax.lax.ragged_all_to_all` as its documentation specifies it, on the host."""
  devices = len(operands)
  results = [np.zeros((rows, WIDTH), operands[0].dtype) for _ in range(devices)]
  arrived = np.zeros((devices, len(all_routes[0].first)), int)
  for source, route in enumerate(all_routes):
    updates = len(route.first) // devices
    for i, (first, sent, there) in enumerate(
      zip(route.first, route.sent, route.there, strict=True)
    ):
      peer = i // updates
      assert 0 <= first <= first + sent <= len(operands[source])
      assert 0 <= there <= there + sent <= rows
      assert not results[peer][there : there + sent].any(), "two rows in one place"
      results[peer][there : there + sent] = operands[source][first : first + sent]
      arrived[peer, source * updates + i % updates] = sent
  for device, route in enumerate(all_routes):
    np.testing.assert_array_equal(route.received, arrived[device])
  return results


def all_routes(sizes_SX, start, rows):
  found = [routes(jnp.array(sizes_SX), EXPERTS, d, start, rows) for d in range(DEVICES)]
  there, back, sizes = zip(*jax.tree.map(np.asarray, found), strict=True)
  return there, back, sizes


@pytest.mark.parametrize("seed", range(3))
def test_rows_arrive_sorted_by_expert_and_return_to_their_places(seed):
  sizes_SX = sizes_of(seed)
  # A row says whose it is and for which expert; no row is 0.
  operands = [
    np.stack([np.repeat(np.arange(12), sizes), np.arange(1, sizes.sum() + 1)], axis=1)
    for sizes in sizes_SX
  ]
  rows = int(sizes_SX.reshape(DEVICES, DEVICES, EXPERTS).sum(axis=(0, 2)).max())
  there, back, sizes = all_routes(sizes_SX, 0, rows)
  received = exchanged(operands, there, rows)
  for device in range(DEVICES):
    local = np.arange(device * EXPERTS, (device + 1) * EXPERTS)
    np.testing.assert_array_equal(sizes[device], sizes_SX[:, local].sum(axis=0))
    filled = received[device][: sizes[device].sum()]
    np.testing.assert_array_equal(filled[:, 0], np.repeat(local, sizes[device]))
    assert not received[device][sizes[device].sum() :].any()
  longest = max(map(len, operands))
  padded = [np.pad(a, ((0, longest - len(a)), (0, 0))) for a in operands]
  for got, want in zip(exchanged(received, back, longest), padded, strict=True):
    np.testing.assert_array_equal(got, want)


def test_windows_together_are_the_whole():
  sizes_SX, rows = sizes_of(3), 7
  operands = [np.arange(1.0, 1 + 2 * n).reshape(n, 2) for n in sizes_SX.sum(axis=1)]
  received_R = sizes_SX.reshape(DEVICES, DEVICES, EXPERTS).sum(axis=(0, 2))
  passes = -(-received_R.max() // rows)
  assert passes > 2
  whole, _, _ = all_routes(sizes_SX, 0, passes * rows)
  parts = [
    exchanged(operands, all_routes(sizes_SX, p * rows, rows)[0], rows) for p in range(passes)
  ]
  for device, want in enumerate(exchanged(operands, whole, passes * rows)):
    np.testing.assert_array_equal(np.concatenate([part[device] for part in parts]), want)
  counted = sum(np.stack(all_routes(sizes_SX, p * rows, rows)[2]) for p in range(passes))
  np.testing.assert_array_equal(counted, all_routes(sizes_SX, 0, passes * rows)[2])


def test_without_the_primitive_a_gather_does_what_it_specifies():
  """As on a CPU, where XLA lacks it."""
  sizes_SX, rows = sizes_of(4), 60
  most = int(sizes_SX.sum(axis=1).max())
  operands = np.random.default_rng(0).standard_normal((DEVICES, most, WIDTH))
  there, back, _ = all_routes(sizes_SX, 0, rows)
  with jax.set_mesh(make_test_mesh(1, 1, 1, DEVICES)):
    cut = spec("experts")

    def local(x_1MD, there, back):
      there, back = (jax.tree.map(lambda a: a[0], tree) for tree in (there, back))
      return ragged_exchange(x_1MD[0], there, back, rows, "experts")

    stack = lambda found: Routes(*map(np.stack, zip(*found, strict=True)))
    f = jax.shard_map(local, in_specs=(cut, cut, cut), out_specs=cut, check_vma=False)
    put = lambda a: jax.device_put(a, jax.NamedSharding(jax.sharding.get_mesh(), cut))
    args = jax.tree.map(put, (operands.astype(np.float32), stack(there), stack(back)))
    got, pullback = jax.vjp(lambda x: f(x, *args[1:]), args[0])
    rows_used = [a[: n.sum()] for a, n in zip(operands.astype(np.float32), sizes_SX, strict=True)]
    want = np.concatenate(exchanged(rows_used, there, rows))
    np.testing.assert_array_equal(got, want)
    # A partial permutation: its derivative brings the rows back, and 0 where none was sent.
    (returned,) = pullback(got)
    sent = np.arange(most) < sizes_SX.sum(axis=1)[:, None]
    np.testing.assert_array_equal(returned, np.where(sent[..., None], args[0], 0))
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @ragged_all_to_all") == 1
    assert "all_gather" not in text
    assert "ragged" not in jax.jit(f).lower(*args).as_text()


@pytest.mark.parametrize(
  ("choices", "hosts", "groups", "mean"),
  [
    (1, 4, (1, 1), 1),
    (2, 4, (1, 1), 2),
    (8, 4, (1, 1), 4),  # no more than all
    (8, 8, (8, 4), 4),  # a group is a host
    (8, 4, (8, 2), 2),  # a host has two groups
    (8, 8, (4, 2), 4),  # a group is on two hosts
    (8, 8, (3, 1), 4),  # and on up to four where they do not divide
  ],
)
def test_room_on_a_host_is_for_tokens_and_not_for_their_choices(choices, hosts, groups, mean):
  room = lambda factor: host_room(64, choices, hosts, factor, *groups)
  assert room(1.0) == 64 * mean // hosts
  assert room(1.5) == min(64, 96 * mean // hosts)
  assert room(float(hosts)) == 64
