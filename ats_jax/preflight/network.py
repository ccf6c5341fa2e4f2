"""Names, addresses and ports that the processes of a job meet at."""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from ats_jax.preflight.rows import Row, Verdict, judged

_CONNECT_SECS = 5.0


def address_row() -> Row:
  """This machine's name, and whether others could reach it by that."""
  name = socket.gethostname()
  addresses = [
    f"{interface} {entry.address}"
    for interface, entries in sorted(psutil.net_if_addrs().items())
    for entry in entries
    if entry.family == socket.AF_INET and not entry.address.startswith("127.")
  ]
  found = f"{name}; {', '.join(addresses) or 'no network'}"
  problems = []
  resolved = _resolve(name)
  if addresses and (resolved is None or is_loopback(resolved)):
    problems.append(
      f"{name} is {resolved or 'no known name'} here: for a job on several machines give the "
      "coordinator's address as a number."
    )
  return judged("network", found, problems)


def coordinator_rows(environ: Mapping[str, str], asked: str | None) -> list[Row]:
  """The address at which processes meet: of this machine and free, or of another one and reachable.

  Args:
    environ: variables of the process; JAX_COORDINATOR_ADDRESS is looked at.
    asked: "host:port"; None = that of the variables.

  Raises:
    ValueError: if it is no address.
  """
  text = asked or environ.get("JAX_COORDINATOR_ADDRESS")
  if not text:
    with socket.socket() as s:
      s.bind(("", 0))
      port = s.getsockname()[1]
    return [Row("coordinator", f"none is set; ports can be opened here (tried {port})")]
  host, _, number = text.rpartition(":")
  if not host or not number.isdecimal() or not 0 < int(number) < 65536:
    raise ValueError(f"coordinator {text!r}: expected HOST:PORT, such as node0:12345.")
  address, port = _resolve(host.strip("[]")), int(number)
  if address is None:
    advice = "Use a name that every machine knows, or a number."
    return [Row("coordinator", f"{text}: no such host", Verdict.BAD, advice)]
  if _is_own(address):
    return [_own_row(text, address, port, environ)]
  return [_other_row(text, address, port)]


def _own_row(text: str, address: str, port: int, environ: Mapping[str, str]) -> Row:
  nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
  if is_loopback(address) and nodes != "1":
    advice = f"{nodes} machines cannot meet at a loopback address: give that of this machine."
    return Row("coordinator", f"{text} is {address}", Verdict.BAD, advice)
  try:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as s:
      s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      s.bind((address, port))
  except OSError as e:
    advice = "Another process listens there, an old job perhaps: end it, or choose another port."
    return Row("coordinator", f"{text}: {e.strerror}", Verdict.BAD, advice)
  return Row("coordinator", f"{text} is this machine ({address}), the port is free")


def _other_row(text: str, address: str, port: int) -> Row:
  try:
    with socket.create_connection((address, port), _CONNECT_SECS):
      return Row("coordinator", f"{text} ({address}) answers")
  except ConnectionRefusedError:
    advice = "That is right before process 0 has started there."
    return Row("coordinator", f"{text} ({address}) is there, nobody listens", Verdict.OK, advice)
  except OSError as e:
    advice = "A firewall, a wrong interface, or the machine is down."
    why = e.strerror or "no answer"
    return Row("coordinator", f"{text} ({address}): {why}", Verdict.BAD, advice)


def is_loopback(address: str) -> bool:
  """Whether an address is of the machine itself only."""
  return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _resolve(host: str) -> str | None:
  try:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
  except OSError:
    return None


def _is_own(address: str) -> bool:
  own = {e.address for entries in psutil.net_if_addrs().values() for e in entries}
  return is_loopback(address) or address in own
