"""Two processes compare what their policies remember: the same, then after a planted difference."""

import os
import socket
import subprocess
import sys

PROCESS = """
import sys
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from ats_jax.orchestrator.memory import Memory
from ats_jax.orchestrator.supervisor import check_agreement

check_agreement(Memory(checks=10, reference=2.0))
print("agreed")
try:
  check_agreement(Memory(checks=20, reference=2.0 + 1e-12 * rank))
except RuntimeError as error:
  print(str(error)[:44])
"""


def test_a_difference_in_the_last_digit_is_caught_on_both():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = str(s.getsockname()[1])
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
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
    assert said == ["agreed", "processes decide differently at look 20: the"]
