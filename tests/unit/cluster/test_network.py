"""Where the processes of a job meet."""

import socket

import pytest

from ats_jax.cluster.preflight.network import address_row, coordinator_rows
from ats_jax.cluster.preflight.results import CheckVerdict


@pytest.fixture
def taken():
  """A port of this machine that somebody listens on."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    s.listen()
    yield s.getsockname()[1]


def test_a_free_port_and_one_that_is_taken(taken):
  (row,) = coordinator_rows(f"127.0.0.1:{taken}", 1)
  assert row.verdict is CheckVerdict.BAD and "Another process listens there" in row.advice
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    free = s.getsockname()[1]
  (row,) = coordinator_rows(f"127.0.0.1:{free}", 1)
  assert row.verdict is CheckVerdict.OK and row.found.endswith("the port is free")


def test_loopback_for_several_machines():
  (row,) = coordinator_rows("127.0.0.1:12345", 2)
  assert row.verdict is CheckVerdict.BAD
  assert row.advice.startswith("2 machines cannot meet at a loopback address")


def test_a_name_that_nobody_knows():
  (row,) = coordinator_rows("no-such-host.invalid:1234", 1)
  assert row.verdict is CheckVerdict.BAD and row.found.endswith("no such host")
  with pytest.raises(ValueError, match="a host and a port were expected"):
    coordinator_rows("host:70000", 1)


def test_none_is_set():
  (row,) = coordinator_rows(None, 1)
  assert row.verdict is CheckVerdict.OK and "ports can be opened here" in row.found
  assert socket.gethostname() in address_row().found
