"""Before jax starts: the processes of a job meet, and find out who is missing or different.

jax ends a process with a stack of its own when another does not come or its port is taken, and
says neither which nor why. Here process 0 listens on the port that jax will have, each other one
sends a card, and all get the same answer. Nothing but the standard library is needed.
"""

import contextlib
import errno
import ipaddress
import json
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ats_jax.exits import FaultError

RETRY_SECS = 0.2  # between two calls of a process that is not there yet
CARD_SECS = 10  # what a process that has called may take to send its card
MAX_CARD = 1 << 20  # bytes; a config is a few thousand
SHOWN = 3  # differing facts
BACKLOG = 1024  # calls that wait to be taken


class JobMember(NamedTuple):
  """One process of a job: how it reaches the others, and its number among them.

  Attributes:
    address: host and port of process 0, "node0:1234".
    size: number of processes of the job.
    rank: number of this process, from 0.
    devices: indices of the machine's devices that this process uses; () = all.
    by: the variable or scheduler that named these values, for messages.
  """

  address: str
  size: int
  rank: int
  devices: tuple[int, ...] = ()
  by: str = "JAX_PROCESS_ID"


class Card(NamedTuple):
  """What a process says of itself.

  Attributes:
    rank: number of the process.
    size: number of processes that it expects.
    host: name of its machine.
    facts: values that must be the same in all processes, by name.
  """

  rank: int
  size: int
  host: str
  facts: Mapping[str, Any]


def call(member: JobMember, facts: Mapping[str, Any], wait_secs: float) -> list[str]:
  """Wait until all processes are there; return their hosts, by rank.

  Args:
    member: this process.
    facts: by name, what must be equal in all processes; values that JSON can hold.
    wait_secs: seconds after which a process that has not come is missing.

  Raises:
    ValueError: in all of them, if two differ in a fact, or say that they are the same.
    FaultError: in all of them, if some do not come; in process 0, if its port is taken.
  """
  card = Card(member.rank, member.size, socket.gethostname(), facts)
  deadline = time.monotonic() + wait_secs
  meet = _gather if member.rank == 0 else _attend
  return meet(member.address, card, deadline, wait_secs)


def split_address(address: str) -> tuple[str, int]:
  """Host and port of "node0:1234" or "[::1]:1234".

  Raises:
    ValueError: if it has no port.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise ValueError(
      f"the address of process 0 is {address!r}; a host and a port were expected, e.g. node0:1234."
    )
  return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
  """Whether a name or number means the machine itself, on every machine."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost" or host.endswith(".localhost")


def _gather(address: str, own: Card, deadline: float, wait_secs: float) -> list[str]:
  """Process 0: take the cards of all others, and answer."""
  present: dict[int, tuple[Card, socket.socket]] = {}
  wrong = ""
  with contextlib.ExitStack() as stack:
    listener, callers = stack.enter_context(_listen(address)), []
    while not (wrong or _all_wait(present, own.size - 1)):
      listener.settimeout(max(deadline - time.monotonic(), 1e-3))
      try:
        caller, _ = listener.accept()
      except TimeoutError:
        break
      stack.enter_context(caller)
      card = _read_card(caller)
      if card is None:
        continue
      callers.append(caller)
      if card.rank in present:
        _drop_gone(present)
      twin, _ = present.get(card.rank, (None, None))
      wrong = _contradiction(own, card, twin)
      present[card.rank] = card, caller
    missing = [rank for rank in range(1, own.size) if rank not in present]
    if wrong:
      answer = {"wrong": wrong}
    elif missing:
      answer = {"missing": _say_missing(missing, own, wait_secs)}
    else:
      answer = {"hosts": [own.host, *(present[rank][0].host for rank in sorted(present))]}
    for caller in callers:
      with contextlib.suppress(OSError):  # it has ended meanwhile
        caller.sendall(_line(answer))
    # Those who called hang up first: then no call of this end keeps the port busy for a while.
    for caller in callers:
      _wait_for_end(caller)
  return _hosts(answer)


def _attend(address: str, own: Card, deadline: float, wait_secs: float) -> list[str]:
  """Another process: send a card to process 0, and take its answer."""
  host, port = split_address(address)
  called = f"process {own.rank} on {own.host} called process 0 at {address} for {wait_secs:g} s"
  while True:
    left = deadline - time.monotonic()
    try:
      connection = socket.create_connection((host, port), timeout=max(min(left, CARD_SECS), 1e-3))
      break
    except OSError as error:
      if left < RETRY_SECS:
        raise FaultError(f"{called}: {error.strerror or error}. {_advice(host)}") from error
      time.sleep(RETRY_SECS)
  with connection:
    # Process 0 may have begun to wait later than this one; it tells who is missing.
    connection.settimeout(max(deadline - time.monotonic(), 0) + wait_secs)
    try:
      connection.sendall(_line(own._asdict()))
      with connection.makefile("rb") as stream:
        answer = json.loads(stream.readline(MAX_CARD) or b"null")
    except (OSError, ValueError) as error:
      raise FaultError(f"{called}: what answers is no process of this job ({error}).") from error
  if not isinstance(answer, dict):
    raise FaultError(f"{called}: it ended before all were there. Its own log says why.")
  return _hosts(answer)


def _hosts(answer: Mapping[str, Any]) -> list[str]:
  if wrong := answer.get("wrong"):
    raise ValueError(wrong)
  if missing := answer.get("missing"):
    raise FaultError(missing)
  return answer["hosts"]


def _listen(address: str) -> socket.socket:
  _, port = split_address(address)
  both = socket.has_dualstack_ipv6()  # as jax: all interfaces, of both kinds
  family = socket.AF_INET6 if both else socket.AF_INET
  try:
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=BACKLOG)
  except OSError as error:
    if error.errno != errno.EADDRINUSE:
      raise
    raise FaultError(
      f"port {port} of {socket.gethostname()} is taken by another program, and process 0 of this "
      "job needs it. End that program, or choose another port: JAX_COORDINATOR_ADDRESS for all "
      "processes, under Slurm JAX_COORDINATOR_PORT."
    ) from error


def _read_card(caller: socket.socket) -> Card | None:
  """The card of one that calls; None if it is no process of ours."""
  caller.settimeout(CARD_SECS)
  try:
    with caller.makefile("rb") as stream:
      return Card(**json.loads(stream.readline(MAX_CARD)))
  except (OSError, ValueError, TypeError):
    return None


def _all_wait(present: dict[int, tuple[Card, socket.socket]], count: int) -> bool:
  """Whether so many have called and still wait for the answer."""
  if len(present) == count:
    _drop_gone(present)  # one that was started again may be on its way
  return len(present) == count


def _drop_gone(present: dict[int, tuple[Card, socket.socket]]) -> None:
  for rank in [rank for rank, (_, caller) in present.items() if _has_gone(caller)]:
    del present[rank]


def _has_gone(caller: socket.socket) -> bool:
  """Whether one that called has ended since."""
  caller.setblocking(False)
  try:
    return caller.recv(1) == b""
  except BlockingIOError:
    return False
  except OSError:
    return True
  finally:
    caller.settimeout(CARD_SECS)  # a long answer is sent in parts


def _wait_for_end(caller: socket.socket) -> None:
  caller.settimeout(1)
  with contextlib.suppress(OSError):
    caller.recv(1)


def _contradiction(own: Card, card: Card, twin: Card | None) -> str:
  """Why a card does not fit into the job of process 0; "" if it does."""
  its = f"process {card.rank} on {card.host}"
  if card.size != own.size:
    return f"process 0 expects {own.size} processes, {its} expects {card.size}."
  twin = own if card.rank == own.rank else twin
  if twin is not None:
    return (
      f"two processes say that they are number {twin.rank}: one on {twin.host}, one on "
      f"{card.host}. Each needs a number of its own, from 0 to {own.size - 1}."
    )
  differ = [n for n in {**own.facts, **card.facts} if own.facts.get(n) != card.facts.get(n)]
  if not differ:
    return ""
  pairs = [f"{n} is {own.facts.get(n)!r} and {card.facts.get(n)!r}" for n in differ[:SHOWN]]
  more = f", and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
  return (
    f"process 0 on {own.host} and {its} were started differently: {'; '.join(pairs)}{more}. All "
    "need the same command and the same versions."
  )


def _say_missing(missing: list[int], own: Card, wait_secs: float) -> str:
  ranks = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
  which = "process" if len(missing) == 1 else "processes"
  return (
    f"{which} {ranks} of {own.size} did not come within {wait_secs:g} s (join_secs). Look at the "
    "logs of those; if they wait for process 0, they do not reach its machine."
  )


def _advice(host: str) -> str:
  if is_loopback(host):
    return (
      f"{host} is each machine itself: processes on several machines need a name of the machine "
      "of process 0 that all of them know."
    )
  return "Either it has not started, or its machine or port cannot be reached from here."


def _line(value: Any) -> bytes:
  return json.dumps(value).encode() + b"\n"
