r"""What the GPUs of one machine do: speed, recovery, experts, a pipeline; in one call of minutes.

Writes what it finds as it goes: results.jsonl (a row a run), log.txt (the end of what each process
printed), check_env.txt, hardware.json, torch_speed.txt, stacks.txt. A part that fails or takes too
long is killed, and the next one begins; one for which too little of the budget is left is skipped.
In this order:
  G  `torch_speed.py` on the second GPU, beside what needs the first one alone
  A  `check_env`, and once G is over with --measure
  B  1.5B on one GPU, on all by one process, and by a process each: the same rows, losses compared
  C  of those processes one is killed, once a checkpoint is complete: seconds to the next step
  D  one is stopped (SIGSTOP): seconds until the watchdog says so, and to the next step
  E  experts: over fsdp, and over mesh.expert
  H  rows of 32,768: one on one GPU, as many as there are GPUs cut over all by mesh.context
  F  a pipeline with a stage on each GPU, and tensor parallelism; then B once more
All runs train on the bytes of Python's standard library with log.every_steps=1; their speed is the
median of the last five eighths of their steps. Runs are killed when they have made them.
It has not run on eight GPUs. `lab/two_hosts.sh` is for two machines.
Command: python -m lab.several_gpus --out=FOLDER [--gpus=2] [--parts=A,B] [--toy]
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import app, flags

from lab.child import Child

TAIL = 20_000  # characters of what a process printed that the log keeps
Settings = Mapping[str, Any]
COMMON: Settings = {
  "num_steps": 100_000, "heartbeat_secs": 10, "data.tokenizer": "bytes", "data.num_workers": 0,
  "data.validation_fraction": 0.0, "eval.every_steps": 0, "eval.bigram_baseline": False,
  "optimizer.schedule": "constant", "optimizer.warmup_steps": 20, "log.every_steps": 1,
  "log.writers": "jsonl,console", "log.progress": False, "sample.max_tokens": 0,
  "checkpoint.every_steps": 100_000,
}  # fmt: skip
ATS = (sys.executable, "-m", "ats_jax")
QUICK = "--xla_backend_optimization_level=0"  # to compile
TOY: Settings = {
  "model.vocab_size": 512, "model.num_layers": 8, "model.num_heads": 8, "model.num_kv_heads": 8,
  "data.max_segments": 16,
}  # fmt: skip
# In a loop over layers and without Triton's matmuls, as that compiles in a third of the time.
EXPERTS: Settings = {
  "model.num_layers": 8, "moe.num_experts": 8, "moe.top_k": 2, "moe.d_ff": 4096,
  "step.remat": "names", "step.scan_unroll": 1, "ops.strict": False,
  "step.compiler_options": "xla_gpu_enable_triton_gemm=false",
}  # fmt: skip
TOY_EXPERTS: Settings = {"moe.num_experts": 8, "moe.top_k": 2, "moe.d_ff": 64}
ROWS = 8  # of a device
LATER = 3  # steps between one event and the next disturbance
ONE, ALL, PROCESSES = "one GPU", "all GPUs, one process", "all GPUs, a process each"
OF_ONE: Settings = {"data.batch_size": ROWS}

_GPUS = flags.DEFINE_integer("gpus", 2, "That the machine has.", lower_bound=2)
_OUT = flags.DEFINE_string("out", None, "Folder of results.", required=True)
_BUDGET = flags.DEFINE_float("budget_secs", 540.0, "Nothing runs past it.", lower_bound=10.0)
_PARTS = flags.DEFINE_list("parts", list("GABCDEFH"), "Which of them; C and D need B.")
_TOY = flags.DEFINE_bool("toy", False, "A small model on this machine's CPU, without G.")
_STEPS = flags.DEFINE_integer("steps", 40, "Of a run of B; others make fewer.", lower_bound=8)
_TORCH_SECS = flags.DEFINE_float("torch_secs", 200.0, "That G may take.", lower_bound=1.0)


class Lab:
  """Runs parts one after the other, and keeps what they find.

  Attributes:
    scratch: a folder for workdirs and caches.
    out: the folder of results.
    config: of the runs.
    names: of what has run.
    found: of each run by name, what `speed` measured.
  """

  def __init__(self, out: Path, scratch: Path):
    """Begin to count the budget."""
    self.out, self.scratch = out, scratch
    self.names, self.found = list[str](), dict[str, dict[str, Any]]()
    self._until, self._pool = time.time() + _BUDGET.value, ThreadPoolExecutor(1)
    self._began = time.time()
    self.config = "configs/debug.py" if _TOY.value else "configs/dense_1_5b.py"

  def row(self, part: str, name: str, **found: Any) -> None:
    """Write a row, and show it without its lists."""
    at = round(time.time() - self._began, 1)
    with (self.out / "results.jsonl").open("a") as file:
      file.write(json.dumps({"part": part, "name": name, "at": at, **found}) + "\n")
    shown = {k: v for k, v in found.items() if not isinstance(v, list)}
    print(f"{at:6.1f} {part} {name}: {shown}", flush=True)

  def part(
    self, part: str, name: str, least: float, most: float, body: Callable[[float], None]
  ) -> None:
    """Run `body` with the time at which it must end; its failure is a row.

    Args:
      part: its letter.
      name: of the run.
      least: seconds without which it does not begin.
      most: that it may take.
      body: what it does.
    """
    if part not in _PARTS.value:
      return
    left = self._until - time.time()
    if left < least:
      self.row(part, name, skipped=f"{left:.0f} s are left, it takes {least:.0f}")
      return
    self.names.append(name)
    began = time.time()
    error = self._pool.submit(body, began + min(most, left)).exception()
    if error is not None:
      self.row(part, name, failed=f"{type(error).__name__}: {error}", secs=time.time() - began)

  def env(self, place: str) -> dict[str, str]:
    """Variables that make a place of this machine."""
    own = {"XDG_CACHE_HOME": str(self.scratch / "cache")}
    if not _TOY.value:
      number = 1 if place == ONE else _GPUS.value
      return own | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number)))}
    devices = _GPUS.value if place == ALL else 1
    flags_of_xla = f"--xla_force_host_platform_device_count={devices} {QUICK}"
    return own | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_of_xla}

  @contextlib.contextmanager
  def running(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Iterator[Child]:
    """A process, until the end of the block; the log gets the end of what it printed."""
    child = Child(command, env)
    try:
      yield child
    finally:
      child.end()
      with (self.out / "log.txt").open("a") as file:
        secs = time.time() - child.began
        file.write(f"\n===== {name}: {' '.join(command)}\n===== {secs:.1f} s, the end of it:\n")
        file.write(f"{child.text(without=line_of(r'\d*[1-9]'))[-TAIL:]}\n")

  @contextlib.contextmanager
  def training(self, name: str, settings: Settings, place: str) -> Iterator[tuple[Child, Path]]:
    """A run in a workdir of its own."""
    folder = self.scratch / re.sub(r"\W+", "-", name)
    verb = (
      ["launch", "local", f"--processes={_GPUS.value}", "--restarts=4"]
      if place == PROCESSES
      else ["train"]
    )
    every = {**COMMON, **(TOY if _TOY.value else {}), **settings}
    options = [f"--config.{key}={value}" for key, value in every.items()]
    command = [*ATS, *verb, f"--config={self.config}", f"--workdir={folder}", *options]
    with self.running(name, command, self.env(place)) as child:
      yield child, folder

  def speed(
    self, part: str, name: str, child: Child, folder: Path, steps: int, until: float, like: str = ""
  ) -> None:
    """Wait for so many steps, and write their speed, beside that of another run."""
    child.when(line_of(steps), until)
    first, _ = child.when("first step done", until)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/loss" in row and row["step"] <= steps]
    losses = [row["train/loss"] for row in rows]
    batch = json.loads((folder / "config.json").read_text())["data"]["batch_size"]
    series = lambda key: [row[key] for row in rows[-(5 * steps // 8) :] if key in row]
    speeds = series("train/tokens_per_sec")
    found: dict[str, Any] = {
      "rows": batch, "tokens_per_sec": statistics.median(speeds),
      "lowest": min(speeds), "highest": max(speeds), "steps_timed": len(speeds),
      "first_loss": losses[0], "last_loss": losses[-1],
      "secs_to_first_step": first - child.began,
    }  # fmt: skip
    for key in ("train/mfu", "memory/device_peak_gib", "memory/device_limit_gib", "moe/overflow"):
      if series(key):
        found[key] = max(series(key)) if key.startswith("mem") else statistics.median(series(key))
    found |= said(child)
    if other := self.found.get(like):
      found["like"] = like
      found["speed_over_it"] = found["tokens_per_sec"] / other["tokens_per_sec"]
      if batch == other["rows"]:
        gaps = [abs(a - b) for a, b in zip(losses, other["losses"], strict=False)]
        found["first_loss_gap"], found["largest_loss_gap"] = gaps[0], max(gaps)
    self.found[name] = found | {"losses": losses}
    self.row(part, name, **self.found[name])

  def train(
    self, part: str, name: str, settings: Settings, place: str, steps: int, least: float,
    most: float, like: str = "",
  ) -> None:  # fmt: skip
    """A part that is a run and its speed."""

    def body(until: float) -> None:
      with self.training(name, settings, place) as (child, folder):
        self.speed(part, name, child, folder, steps, until, like)

    self.part(part, name, least, most, body)


def experts() -> Settings:
  """The model with experts."""
  return TOY_EXPERTS if _TOY.value else EXPERTS


def of_all() -> Settings:
  """Rows for all GPUs, and the mesh that shards the weights over them."""
  return {"data.batch_size": _GPUS.value * ROWS, "mesh.fsdp": _GPUS.value}


def line_of(step: int | str) -> str:
  """What the console's line of a step looks like."""
  return rf"^step +{step} +train "


def said(child: Child) -> dict[str, str]:
  """What a run's log says of itself."""
  patterns = {
    "devices": r" devices: (.*)$",
    "parameters": r"^total: ([\d,]+) parameters",
    "mesh": r" mesh: (.*)$",
    "pipeline": r"(\d+ stages of .*)$",
    "compiled": r"the train step was compiled (.*)$",
  }
  found = {name: re.search(pattern, child.text(), re.M) for name, pattern in patterns.items()}
  return {name: match[1] for name, match in found.items() if match}


def check_env(lab: Lab, measure: bool, until: float) -> None:
  """What the machine is, as a file."""
  more = ["--measure", f"--hardware={lab.out / 'hardware.json'}"] if measure else []
  command = ["check_env", f"--workdir={lab.scratch}", *more]
  with lab.running(" ".join(command), [*ATS, *command], lab.env(ALL)) as child:
    code = child.ended(until)
  (lab.out / "check_env.txt").write_text(child.text() + "\n")
  links = [line for _, line in child.lines if re.match(r"links|all_|reduce_", line)]
  lab.row("A", command[0] + " --measure" * measure, code=code, links=links)


def bench(lab: Lab, until: float) -> None:
  """The speed that the tables of docs/reference/performance.md have."""
  with lab.running("bench", [*ATS, "bench", f"--config={lab.config}"], lab.env(ONE)) as child:
    lab.row("B", f"bench, {ONE}", **json.loads(child.when(r'^\{"jax"', until)[1]))


def torch_speed(lab: Lab, child: Child, until: float) -> None:
  """Wait for `torch_speed.py`, and keep what it printed."""
  try:
    code = child.ended(until)
  finally:
    child.end()
    (lab.out / "torch_speed.txt").write_text(child.text() + "\n")
  lines = [line for _, line in child.lines if line.startswith(("|", "moe:"))]
  found = {"code": code, "secs": time.time() - child.began, "beside": lab.names[:-1]}
  lab.row("G", "torch_speed", **found, lines=lines, last=child.lines[-1][1])


def disturbed(lab: Lab, steps: int, until: float) -> None:
  """B by a process on each GPU; then, of the same run, C and D."""
  settings = {**of_all(), "checkpoint.every_steps": steps}
  with lab.training(PROCESSES, settings, PROCESSES) as (job, folder):
    lab.speed("B", PROCESSES, job, folder, steps, min(until, job.began + 130), like=ALL)
    reached = time.time()
    if "C" in _PARTS.value:
      while not newest(folder):
        if time.time() > min(until, reached + 80) or not job.runs:
          raise TimeoutError("the checkpoint was not complete in time")
        time.sleep(0.02)
      saved = time.time() - reached
      killed = disturb(job, signal.SIGKILL, until)
      found = recovery(job, killed, min(until, killed + 90))
      lab.row("C", "kill -9 of process 1", checkpoint_secs=saved, dtype="float32", **found)
    if "D" in _PARTS.value:
      stopped = disturb(job, signal.SIGSTOP, until)
      at, line = job.when("without a sign of life", min(until, stopped + 60), stopped)
      found = recovery(job, stopped, min(until, stopped + 120))
      heartbeat = COMMON["heartbeat_secs"]
      lab.row("D", "SIGSTOP of process 1", heartbeat=heartbeat, to_line=at - stopped, line=line,
              stacks=(folder / "stacks.txt").exists(), **found)  # fmt: skip
      shutil.copy(folder / "stacks.txt", lab.out)


def newest(folder: Path) -> int:
  """The newest checkpoint that is complete; 0 = none."""
  names = [path.name for path in (folder / "checkpoints").glob("*")]
  return max((int(name) for name in names if name.isdecimal()), default=0)


def disturb(job: Child, number: signal.Signals, until: float) -> float:
  """Send process 1 a signal some steps later; when."""
  now, line = [found for found in job.lines if re.match(line_of(r"\d+"), found[1])][-1]
  job.when(line_of(int(line.split()[1]) + LATER), until, now)
  at, process = time.time(), job.rank(1)
  os.kill(process, number)
  return at


def recovery(job: Child, at: float, until: float) -> dict[str, Any]:
  """Seconds from a disturbance to what follows it, as far as that came."""
  events, after = {}, at
  before = [line for came, line in job.lines if came <= at and re.match(line_of(r"\d+"), line)]
  for name, pattern in (
    ("ended", "launch: process"),
    ("restart", "launch: starting all"),
    ("joined", rf"job: {_GPUS.value} processes"),
    ("restored", r"resuming .* from step"),
    ("first_step", "first step done"),
    ("first_row", line_of(r"\d+")),
  ):
    try:
      after, line = job.when(pattern, until, after - 1e-6)
    except (TimeoutError, ChildProcessError) as error:
      return events | {"failed": str(error)}
    events[f"to_{name}"] = after - at
    if name in ("ended", "restored", "first_row"):
      events[name] = line.strip()
  return events | {"last_row_before": before[-1].strip()}


def with_one_gpu(lab: Lab, torch: Child | None) -> None:
  """What takes the first GPU alone, until `torch_speed.py` is done with the second."""
  steps, idle = _STEPS.value, lambda: _TOY.value or (torch is not None and torch.runs)
  lab.part("A", "check_env", 15, 60, functools.partial(check_env, lab, False))
  lab.train("B", ONE, OF_ONE, ONE, steps, 45, 120)
  if idle():
    lab.train("E", f"experts, {ONE}", {**experts(), **OF_ONE}, ONE, 2 * steps // 5, 40, 90)
  if idle():
    lab.part("B", "bench", 40, 90, functools.partial(bench, lab))
  if torch is not None:
    until = torch.began + _TORCH_SECS.value
    lab.part("G", "torch_speed", 0, 600, lambda _: torch_speed(lab, torch, until))


def with_all_gpus(lab: Lab) -> None:
  """The rest."""
  steps, number = _STEPS.value, _GPUS.value
  whole = {**of_all(), "mesh.fsdp": 1, "ops.strict": False}
  lab.part("A", "check_env --measure", 20, 70, functools.partial(check_env, lab, True))
  lab.train("B", ALL, of_all(), ALL, steps, 45, 120, like=ONE)
  lab.part("B", PROCESSES, 60, 330, functools.partial(disturbed, lab, steps))
  like = "experts, fsdp"
  lab.train("E", like, {**experts(), **of_all()}, ALL, 2 * steps // 5, 30, 80)
  settings = {**whole, **experts(), "mesh.expert": number}
  lab.train("E", f"experts, mesh.expert={number}", settings, ALL, 2 * steps // 5, 30, 70, like)
  long = {"data.seq_len": 32_768 if not _TOY.value else 512, "ops.strict": False}
  one, cut = f"long rows, {ONE}", f"long rows, mesh.context={number}"
  lab.train("H", one, {**long, "data.batch_size": 1}, ONE, 2 * steps // 5, 45, 90)
  settings = {**long, "data.batch_size": number, "mesh.context": number}
  lab.train("H", cut, settings, ALL, 2 * steps // 5, 45, 90, like=one)
  for axis, more in (("stage", {"step.accum_steps": 8}), ("tensor", {})):
    settings = {**whole, f"mesh.{axis}": number, **more}
    lab.train("F", f"mesh.{axis}={number}", settings, ALL, steps // 2, 36, 80, like=ALL)
  for place in (ALL, PROCESSES):
    lab.train("B", f"{place}, again", of_all(), place, steps, 40, 80, like=ALL)


def main(argv: list[str]) -> None:
  """Run the parts."""
  del argv
  out = Path(_OUT.value).resolve()
  out.mkdir(parents=True, exist_ok=True)
  with (
    tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
    contextlib.ExitStack() as stack,
  ):
    lab, torch = Lab(out, Path(scratch)), None
    if "G" in _PARTS.value and _TOY.value:
      lab.row("G", "torch_speed", skipped="it takes a second GPU")
    elif "G" in _PARTS.value:
      command = [sys.executable, "-m", "lab.torch_speed", "--sizes=moe", "--rounds=3"]
      env = lab.env(ONE) | {"CUDA_VISIBLE_DEVICES": "1"}
      torch = stack.enter_context(lab.running("torch_speed", command, env))
    with_one_gpu(lab, torch)
    with_all_gpus(lab)
    lab.row("", "end")


if __name__ == "__main__":
  app.run(main)
