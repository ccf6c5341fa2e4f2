"""`ats-jax check_env` as a user runs it."""

import json
import socket

from commands import called

from ats_jax import exits


def test_a_machine_that_is_fine(tmp_path):
  measured = tmp_path / "hardware.json"
  flags = (f"--workdir={tmp_path}/runs", "--measure", f"--hardware={measured}", "--json")
  done = called("check_env", *flags)
  assert done.code == exits.DONE, done
  rows = {row["name"]: row for row in json.loads(done.out)}
  assert {"packages", "devices", "GPUs", "disk", "coordinator", "matmul", "hardware"} <= set(rows)
  assert not (tmp_path / "runs").exists()
  plan = called("plan", "--config=debug", f"--hardware={measured}")
  assert plan.code == exits.DONE and "a step, from rates measured on" in plan.out


def test_one_that_is_not():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    s.listen()
    asked = f"--coordinator=127.0.0.1:{s.getsockname()[1]}"
    done = called("check_env", "--workdir=/proc/runs", asked)
  assert done.code == exits.FAULT and "Traceback" not in done.err
  assert "workdir         bad     /proc/runs: " in done.out
  assert "coordinator     bad" in done.out


def test_wrong_flags(tmp_path):
  said = called("check_env", "--hardware=x").error()
  assert said.startswith("--hardware says where --measure writes; that is missing.")
  said = called("check_env", f"--workdir={tmp_path}", "--coordinator=node0").error()
  assert said.startswith("the address of process 0 is 'node0'; a host and a port were expected")
  said = called("plan", f"--hardware={tmp_path}/none").error()
  assert said.startswith("there is no ")
