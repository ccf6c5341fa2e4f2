"""Names, addresses and ports that the processes of a job meet at."""

import socket

import psutil

from ats_jax.cluster import rendezvous
from ats_jax.cluster.preflight.results import CheckResult, CheckVerdict, check_result

_CONNECT_SECS = 5.0


def address_row() -> CheckResult:
  """This machine's name, and whether others could reach it by that."""
  name = socket.gethostname()
  addresses = [
    f"{interface} {entry.address}"
    for interface, entries in sorted(psutil.net_if_addrs().items())
    for entry in entries
    if entry.family == socket.AF_INET and not entry.address.startswith("127.")
  ]
  text = f"{name}; {', '.join(addresses) or 'no network'}"
  problems = []
  resolved = _resolve(name)
  if addresses and (resolved is None or rendezvous.is_loopback(resolved)):
    problems.append(
      f"{name} is {resolved or 'no known name'} here: for a job on several machines give the "
      "coordinator's address as a number."
    )
  return check_result("network", text, problems)


def coordinator_rows(address: str | None, nodes: int) -> list[CheckResult]:
  """Where processes meet: on this machine and free, or on another one and reachable.

  Args:
    address: "host:port"; None = this process is alone.
    nodes: machines of the job.

  Raises:
    ValueError: if it is no address.
  """
  if address is None:
    with socket.socket() as s:
      s.bind(("", 0))
      port = s.getsockname()[1]
    return [CheckResult("coordinator", f"none is set; ports can be opened here (tried {port})")]
  host, port = rendezvous.split_address(address)
  number = _resolve(host)
  if number is None:
    advice = "Use a name that every machine knows, or a number."
    return [CheckResult("coordinator", f"{address}: no such host", CheckVerdict.BAD, advice)]
  if _is_own(number):
    return [_own_row(address, number, port, nodes)]
  return [_other_row(address, number, port)]


def _own_row(text: str, address: str, port: int, nodes: int) -> CheckResult:
  if rendezvous.is_loopback(address) and nodes > 1:
    advice = f"{nodes} machines cannot meet at a loopback address: give that of this machine."
    return CheckResult("coordinator", f"{text} is {address}", CheckVerdict.BAD, advice)
  try:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as s:
      s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      s.bind((address, port))
  except OSError as e:
    advice = "Another process listens there, an old job perhaps: end it, or choose another port."
    return CheckResult("coordinator", f"{text}: {e.strerror}", CheckVerdict.BAD, advice)
  return CheckResult("coordinator", f"{text} is this machine ({address}), the port is free")


def _other_row(text: str, address: str, port: int) -> CheckResult:
  try:
    with socket.create_connection((address, port), _CONNECT_SECS):
      return CheckResult("coordinator", f"{text} ({address}) answers")
  except ConnectionRefusedError:
    advice = "That is right before process 0 has started there."
    return CheckResult(
      "coordinator", f"{text} ({address}) is there, nobody listens", CheckVerdict.OK, advice
    )
  except OSError as e:
    advice = "A firewall, a wrong interface, or the machine is down."
    why = e.strerror or "no answer"
    return CheckResult("coordinator", f"{text} ({address}): {why}", CheckVerdict.BAD, advice)


def _resolve(host: str) -> str | None:
  try:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
  except OSError:
    return None


def _is_own(address: str) -> bool:
  own = {e.address for entries in psutil.net_if_addrs().values() for e in entries}
  return rendezvous.is_loopback(address) or address in own
