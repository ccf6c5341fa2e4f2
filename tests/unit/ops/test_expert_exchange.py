"""Room for the rows that devices exchange with experts."""

import pytest

from ats_jax.ops.expert_exchange import host_capacity


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
  room = lambda factor: host_capacity(64, choices, hosts, factor, *groups)
  assert room(1.0) == 64 * mean // hosts
  assert room(1.5) == min(64, 96 * mean // hosts)
  assert room(float(hosts)) == 64
