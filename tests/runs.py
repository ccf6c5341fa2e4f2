"""Real training processes: start them, stop them at a chosen moment, compare what they leave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from xla_flags import QUICK

from ats_jax.metrics.rows import read_jsonl
from ats_jax.metrics.writer import is_time_key

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_SECS = 480  # on a busy machine the step of a small sparse model compiles for a minute
# A model that compiles in seconds, and no part of a run that takes longer than it.
TINY = (
  "model.num_layers=1",
  "model.d_model=32",
  "model.num_heads=2",
  "model.num_kv_heads=2",
  "model.d_ff=32",
  "data.validation_fraction=0.2",
  "data.tokenizer=bytes",
  "eval.bigram_baseline=False",
  "log.every_steps=1",
)


def start(
  workdir: Path,
  *overrides: str,
  config: str = "configs/debug.py",
  launch: tuple[str, ...] = (),
  verb: tuple[str, ...] = (),
  **env: str,
):
  """Start `python -m ats_jax.train`; stdout and stderr come line by line from `.stdout`.

  With flags for it in `launch`, start `python -m ats_jax.cluster.launch`; or another `verb`, with
  its flags and no config.
  """
  flags = [f"--config.{o}" for o in overrides]
  module = ["ats_jax", "launch", "local", *launch] if launch else ["ats_jax.train"]
  named = [f"--config={config}"]
  if verb:
    module, named = ["ats_jax", *verb], []
  command = [sys.executable, "-m", *module, *named, f"--workdir={workdir}"]
  return subprocess.Popen(
    [*command, *flags],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=REPOSITORY,
    env={**os.environ, "PYTHONUNBUFFERED": "1", "XLA_FLAGS": QUICK, **env},
  )


def finish(process: subprocess.Popen) -> str:
  """Wait for a run to end well; return what it printed."""
  output, _ = process.communicate(timeout=TIMEOUT_SECS)
  assert process.returncode == 0, output
  return output


def read_to(process: subprocess.Popen, step: int) -> str:
  """Wait until the metrics of `step` are printed; return what was printed so far."""
  lines = []
  for line in process.stdout:
    lines.append(line)
    if line.startswith("step") and "train" in line and int(line.split()[1]) >= step:
      return "".join(lines)
  raise AssertionError("".join(lines))


def stop_at(process: subprocess.Popen, step: int, number: signal.Signals) -> str:
  """Send a signal when the metrics of `step` are printed; return everything printed."""
  begin = read_to(process, step)
  process.send_signal(number)
  rest, _ = process.communicate(timeout=TIMEOUT_SECS)
  return begin + rest


def kill_while_writing(process: subprocess.Popen, workdir: Path, after_step: int) -> str:
  """Kill -9 while a checkpoint later than `after_step` is being written; return its folder."""
  deadline = time.monotonic() + TIMEOUT_SECS
  while time.monotonic() < deadline:
    for folder in (workdir / "checkpoints" / "unfinished").glob("*"):
      if folder.name.split(".")[0].isdecimal() and int(folder.name.split(".")[0]) > after_step:
        process.kill()
        process.communicate()
        return folder.name
    time.sleep(0.0005)
  raise AssertionError("no checkpoint was written in time")


def arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
  """Every array of a checkpoint, by name, whatever the devices that it was saved from."""
  path, checkpointer = workdir / "checkpoints" / str(step) / "state", ocp.PyTreeCheckpointer()
  saved = checkpointer.metadata(path).item_metadata.tree
  as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
  tree = checkpointer.restore(path, restore_args=as_numpy)
  data = lambda v: jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
  return {jax.tree_util.keystr(k): np.asarray(data(v)) for k, v in jax.tree.leaves_with_path(tree)}


def rows(workdir: Path, prefix: str = "") -> list[dict[str, float]]:
  """The rows of metrics.jsonl without what depends on time."""
  found = []
  for row in read_jsonl(workdir / "metrics.jsonl"):
    kept = {k: v for k, v in row.items() if not is_time_key(k)}
    if any(k.startswith(prefix) for k in kept if k != "step") and len(kept) > 1:
      found.append(kept)
  return found


def losses(workdir: Path) -> list[float]:
  """The training losses, by step from 1."""
  found = [(row["step"], row["train/loss"]) for row in rows(workdir, "train/loss")]
  assert [step for step, _ in found] == list(range(1, len(found) + 1))
  return [loss for _, loss in found]


def assert_same_run(one: Path, other: Path, step: int) -> None:
  """Both runs left the same arrays, metrics and data position, bit for bit."""
  left, right = arrays(one, step), arrays(other, step)
  assert left.keys() == right.keys() and len(left) > 20
  for name in left:
    np.testing.assert_array_equal(left[name], right[name], err_msg=name)
  assert rows(one) == rows(other)
  extra = "checkpoints", str(step), "extra.json"
  assert one.joinpath(*extra).read_text() == other.joinpath(*extra).read_text()
