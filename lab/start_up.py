r"""How long `ats-jax generate` takes from its start to the first token, with random weights.

Makes a workdir by `ats-jax bridge import` of a folder as Llama is published (extras `torch`, `hf`),
and generates from it: with an empty compilation cache, and then with what that left, as often as
asked. Prints a JSON line for each: seconds from the start of the process to the first piece of
text, and to the end of it.
Command: python -m lab.start_up --layers=16 --width=2048 [--vocab=128256] [--workdir=DIR]
"""

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from lab.import_8b import into_workdir, write

_WARM = flags.DEFINE_integer("warm", 2, "Times with a filled cache.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", "", "A run that is there already.")


def generate(workdir: Path, cache: Path) -> dict[str, float]:
  """Times of a process."""
  command = [sys.executable, "-m", "ats_jax", "generate", f"--workdir={workdir}"]
  command += ["--prompt=x", "--max_tokens=32", "--temperature=0"]
  began = time.perf_counter()
  environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
  with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
    assert process.stdout is not None
    prompt = process.stdout.read(1)
    assert prompt == b"x", prompt
    known = time.perf_counter() - began
    process.stdout.read(1)
    first = time.perf_counter() - began
    process.stdout.read()
  assert process.returncode == 0, process.returncode
  times = {"loaded": known, "first_token": first, "end": time.perf_counter() - began}
  return {name: round(secs, 2) for name, secs in times.items()}


def main(argv: list[str]) -> None:
  """Make the run if need be, and time processes."""
  del argv
  shape = flags.FLAGS
  with tempfile.TemporaryDirectory() as made:
    folder, workdir = Path(made) / "model", Path(_WORKDIR.value or f"{made}/run")
    if not workdir.exists():
      for task in (
        functools.partial(write, folder, shape.layers, shape.width, shape.vocab, shape.sharp),
        functools.partial(into_workdir, folder, workdir),
      ):  # each in a process, so that no device is held by this one
        process = multiprocessing.get_context("spawn").Process(target=task)
        process.start()
        process.join()
        assert process.exitcode == 0, task
    cache = Path(made) / "cache"
    for number in range(1 + _WARM.value):
      row = {"layers": shape.layers, "width": shape.width, "cache": "filled" if number else "empty"}
      print(json.dumps(row | generate(workdir, cache)), flush=True)


if __name__ == "__main__":
  app.run(main)
