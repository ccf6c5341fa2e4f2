"""Two processes compare what they see, remember and decide: the same, and with one difference."""

import os
import socket
import subprocess
import sys
from pathlib import Path

READINGS = Path(__file__).parents[1] / "unit" / "orchestrator"
PROCESS = """
import sys
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from readings import reading
from ats_jax.orchestrator.actions import Rollback
from ats_jax.orchestrator.policy.state import PolicyState
from ats_jax.orchestrator.record.ledger import check_agreement
from ats_jax.orchestrator.policy.state import Decision

decisions = Decision(0, Rollback(), "state", 1.0, ""), Decision(0, Rollback(1), "state", 1.0, "")
cases = {
  "same": (PolicyState(reference=2.0), reading(0), decisions[:1]),
  "memory": (PolicyState(reference=2.0 + 1e-12 * rank), reading(0), ()),
  "reading": (PolicyState(), reading(0, probe=2.0 + 1e-12 * rank), ()),
  "decision": (PolicyState(), reading(0), decisions[rank : rank + 1]),
  "same again": (PolicyState(), reading(0, probe=float("nan")), ()),
}
for name, case in cases.items():
  try:
    check_agreement(*case)
    print(name, "agreed")
  except RuntimeError as error:
    print(name, str(error)[:36])
"""


def test_a_difference_in_the_last_digit_is_caught_on_both():
  differ = "processes see or decide differently"
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = str(s.getsockname()[1])
  path = os.pathsep.join([str(READINGS), *sys.path])
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": path}
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", PROCESS, str(rank), port],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=env,
    )
    for rank in (0, 1)
  ]
  for process in processes:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    said = [line for line in out.splitlines() if "Gloo" not in line]
    assert said == [
      "same agreed", f"memory {differ} ", f"reading {differ} ", f"decision {differ} ",
      "same again agreed",
    ]  # fmt: skip
