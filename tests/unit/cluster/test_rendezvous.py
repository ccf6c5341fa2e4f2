"""Processes meet before jax starts: who is missing, who differs, what a taken port says."""

import socket
import threading

import pytest
from processes import free_port

from ats_jax.cluster import rendezvous
from ats_jax.cluster.rendezvous import JobMember
from ats_jax.exits import FaultError

FACTS = {"jax": "0.11.2", "num_steps": 400}


class Call(threading.Thread):
  """A process that calls, as a thread: its hosts or its error."""

  def __init__(self, port, rank, size=2, facts=FACTS, wait=20.0, host="localhost"):
    super().__init__(daemon=True)
    self.arguments = JobMember(f"{host}:{port}", size, rank), facts, wait
    self.result: list[str] | Exception | None = None
    self.start()

  def run(self):
    try:
      self.result = rendezvous.call(*self.arguments)
    except (ValueError, FaultError) as error:
      self.result = error

  def end(self):
    self.join(30)
    assert not self.is_alive()
    return self.result


@pytest.fixture(autouse=True)
def events(monkeypatch):
  """What the processes do, as semaphores: "listen", "retry" and "read" go up when it is done."""
  events = {name: threading.Semaphore(0) for name in ("listen", "retry", "read")}

  def telling(name, function):
    def told(*args):
      result = function(*args)
      events[name].release()
      return result

    return told

  monkeypatch.setattr(rendezvous, "_listen", telling("listen", rendezvous._listen))
  monkeypatch.setattr(rendezvous, "_read_card", telling("read", rendezvous._read_card))
  monkeypatch.setattr(rendezvous.time, "sleep", telling("retry", rendezvous.time.sleep))
  return events


def connected(port, events):
  """A connection to process 0 once it listens."""
  assert events["listen"].acquire(timeout=30)
  return socket.create_connection(("localhost", int(port)))


def test_all_meet_whoever_comes_first_and_the_port_is_free_again(events):
  port = free_port()
  callers = []
  for rank in (2, 1):
    callers.append(Call(port, rank, size=3))
    assert events["retry"].acquire(timeout=30)
  callers.append(Call(port, 0, size=3))
  assert [c.end() for c in callers] == [[socket.gethostname()] * 3] * 3
  socket.create_server(("", int(port))).close()  # as the service of jax will


def test_those_that_came_are_told_who_did_not():
  port = free_port()
  present = [Call(port, rank, size=5, wait=1) for rank in (0, 3)]
  for caller in present:
    error = caller.end()
    assert isinstance(error, FaultError)
    assert str(error).startswith("processes 1, 2, 4 of 5 did not come within 1 s (join_secs)")


def test_without_process_0_a_process_says_whom_it_called():
  error = Call(free_port(), 1, wait=0.5).end()
  assert isinstance(error, FaultError) and "called process 0 at localhost:" in str(error)
  assert "Connection refused. localhost is each machine itself" in str(error)
  error = Call(free_port(), 1, wait=0.5, host="no-such-host.invalid").end()
  assert isinstance(error, FaultError) and "no-such-host.invalid" in str(error)
  assert "its machine or port cannot be reached" in str(error)


def test_a_taken_port_is_named():
  with socket.create_server(("", 0)) as other:
    error = Call(port := other.getsockname()[1], 0).end()
  assert isinstance(error, FaultError)
  assert f"port {port} of {socket.gethostname()} is taken by another program" in str(error)


def test_a_program_that_answers_otherwise_is_no_process_of_the_job():
  with socket.create_server(("", 0)) as other:
    caller = Call(other.getsockname()[1], 1, wait=5)
    connection, _ = other.accept()
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    connection.close()
    error = caller.end()
  assert isinstance(error, FaultError) and "what answers is no process of this job" in str(error)


def test_who_calls_with_something_else_is_left_out(events):
  port = free_port()
  first = Call(port, 0)
  with connected(port, events) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert Call(port, 1).end() == first.end() == [socket.gethostname()] * 2


def test_processes_that_were_started_differently_are_refused_by_all():
  port = free_port()
  both = Call(port, 0), Call(port, 1, facts=FACTS | {"num_steps": 500})
  for error in (caller.end() for caller in both):
    assert isinstance(error, ValueError)
    assert "were started differently: num_steps is 400 and 500. All need the same" in str(error)
  port = free_port()
  both = Call(port, 0), Call(port, 1, size=3)
  for error in (caller.end() for caller in both):
    assert str(error).startswith("process 0 expects 2 processes, process 1 on")


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_one_that_ended_may_come_again(order, events):
  port = free_port()
  callers = [Call(port, 0, size=3)]
  card = rendezvous._line({"rank": 1, "size": 3, "host": "a", "facts": FACTS})
  with connected(port, events) as gone:
    gone.sendall(card)
    assert events["read"].acquire(timeout=30)
  for rank in order:
    callers.append(Call(port, rank, size=3))
    assert events["read"].acquire(timeout=30)
  assert [caller.end() for caller in callers] == [[socket.gethostname()] * 3] * 3


def test_two_of_one_number_are_refused():
  port = free_port()
  callers = [Call(port, 0, size=3), Call(port, 1, size=3), Call(port, 1, size=3)]
  errors = [str(caller.end()) for caller in callers]
  assert all(e.startswith("two processes say that they are number 1: one on") for e in errors)


def test_addresses():
  for address in ("node0", "node0:", "node0:x", ":1234", "node0:99999"):
    with pytest.raises(ValueError, match="a host and a port were expected"):
      rendezvous.split_address(address)
  assert rendezvous.split_address("[::1]:80") == ("::1", 80)
  assert all(map(rendezvous.is_loopback, ("localhost", "127.0.0.1", "127.0.1.1", "::1")))
  assert not any(map(rendezvous.is_loopback, ("node0", "10.0.0.1", "localhost1", "fe80::1")))
