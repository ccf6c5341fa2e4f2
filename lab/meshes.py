r"""Speed, memory and what is not hidden, of training steps on one to eight GPUs of one machine.

Compiles the steps of all cases at once, each in a process of its own; then times one after the
other, taken from the compilation cache: random tokens, steps that are queued, twice, and a trace of
two more (of one more where a round has one). Rows a device are those of the case on one GPU, but
for long rows. A case on one GPU runs on each of --gpus, as GPUs of a kind differ by some per cent
and a step goes at the pace of the slowest: `of_all` is the share of what all make alone, and
`of_slowest` of what as many of the slowest would make. Writes as it goes:
results.jsonl (a row a case), log.txt, and buffers.txt.gz (of the case of --dump, how XLA lays out
its memory).
The cases of eight GPUs ("1.5B eight", "8B eight", ...) have not run on such a machine, only some of
them with --toy on a CPU. `lab/two_hosts.sh` is for two machines.
Command: python -m lab.meshes --out=FOLDER [--gpus=8] [--cases=1.5B,"8B eight"] [--budget_secs=560]
  [--toy]
"""

import collections
import dataclasses
import gzip
import itertools
import json
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import app, flags

from lab.child import Child

COMMON = "data.tokenizer=bytes data.max_segments=1 ops.strict=false precision.param_dtype=bfloat16 "
COMMON += "optimizer.mu_dtype=bfloat16 optimizer.nu_dtype=bfloat16"
MODELS = {
  "1.5B": "",
  "8B": "model.num_layers=32 model.d_model=4096 model.d_ff=14336",
  "experts": "model.num_layers=24 model.num_heads=16 model.num_kv_heads=4 model.d_ff=7168 "
  "moe.num_experts=8 moe.top_k=2 moe.d_ff=7168 step.remat=names",
}
# For GPUs of 80 GB.
MODELS["16"] = MODELS["experts"].replace("num_layers=24", "num_layers=16")
MODELS["5B"] = MODELS["8B"].replace("num_layers=32", "num_layers=20")
MODELS["fine"] = MODELS["experts"].replace(
  "moe.num_experts=8 moe.top_k=2 moe.d_ff=7168", "moe.num_experts=64 moe.top_k=4 moe.d_ff=896"
)
MODELS["half"] = MODELS["fine"].replace("num_layers=24", "num_layers=12")  # for one GPU
MODELS["14B"] = "model.num_layers=40 model.d_model=5120 model.num_heads=40 model.num_kv_heads=10 "
MODELS["14B"] += "model.d_ff=13824 model.vocab_size=50304 model.tie_embeddings=true "
MODELS["14B"] += (
  "precision.param_dtype=float32 optimizer.mu_dtype=float32 optimizer.nu_dtype=float32"
)
MODELS["30B"] = "model.num_layers=48 model.d_model=8192 model.num_heads=64 model.num_kv_heads=16 "
MODELS["30B"] += "model.d_ff=22016 model.vocab_size=50304 model.tie_embeddings=true step.remat=full"
TOY = "model.vocab_size=512 model.num_layers=4 model.d_model=64 model.num_heads=8 "
TOY += "model.num_kv_heads=2 model.d_ff=128 data.seq_len=64 step.scan_unroll=4"
NO_TRITON = "xla_gpu_enable_triton_gemm=false"
FLIGHTS = "xla_gpu_experimental_parallel_collective_overlap_limit="
EARLY = "xla_gpu_experimental_collective_start_as_early_as_possible=true"


@dataclasses.dataclass(frozen=True)
class Case:
  """A step to compile and to time.

  Attributes:
    name: its first word is that of a model.
    devices: how many GPUs it takes.
    settings: of the run, as words SETTING=VALUE.
    xla: options of the compiler, with commas between.
    steps: of a timed round.
    like: the case that it is compared with.
    traced: whether two more steps are traced.
  """

  name: str
  devices: int
  settings: str
  xla: str = ""
  steps: int = 12
  like: str = ""
  traced: bool = True

  @property
  def flags(self) -> list[str]:
    """Of the run."""
    words = f"{COMMON} {MODELS[self.name.split()[0]]} {self.settings}"
    if _TOY.value:
      words += f" {TOY}{' moe.d_ff=64' * ('moe.d_ff' in words)}"
    options = f"step.compiler_options={'' if _TOY.value else self.xla}"
    return [f"--config.{word}" for word in [*words.split(), options]]


def cases() -> list[Case]:
  """Those that are asked for, in that order."""
  fsdp, keep = "mesh.fsdp=2", "mesh.fsdp=2 mesh.keep_gathered=true"
  copies = f"{keep} mesh.copy_engines=true"
  found = [
    Case("1.5B one", 1, "data.batch_size=8"),
    Case("8B one", 1, "data.batch_size=4", steps=5),
    Case("experts one", 1, "data.batch_size=4", NO_TRITON),
  ]
  flights = {
    "1": f"{FLIGHTS}1",
    "2": f"{FLIGHTS}2",
    "4": f"{FLIGHTS}4",
    "4e": f"{FLIGHTS}4,{EARLY}",
  }
  for way, xla in reversed(flights.items()):
    for name, mesh in (("keep", keep), ("fsdp", fsdp)):
      found += [
        Case(f"8B {name} {way}", 2, f"data.batch_size=8 {mesh}", xla, 5, "8B one"),
        Case(f"1.5B {name} {way}", 2, f"data.batch_size=16 {mesh}", xla, like="1.5B one"),
        Case(f"experts {name} {way}", 2, f"data.batch_size=8 {mesh}", f"{NO_TRITON},{xla}",
             like="experts one"),
      ]  # fmt: skip
  long, longer = (f"data.seq_len={n} step.remat=full" for n in (32_768, 131_072))
  cut = {
    "context": "mesh.context=2",
    "tensor": "mesh.tensor=2",
  }
  found.append(Case("8B long one", 1, f"{long} data.batch_size=1", steps=2, traced=False))
  for name in ("attention", "qkv"):
    cut[name] = f"mesh.context=2 step.remat={name}"
    cut[f"{name} copies"] = f"{cut[name]} mesh.copy_engines=true"
  for name, mesh in cut.items():
    xla = "" if "remat" in mesh else flights["4e"]
    if name == "attention":  # an H100 has no room for several gathered weights beside its results
      xla = "xla_gpu_memory_limit_slop_factor=70"
    traced = name == "context" or "remat" in mesh
    found.append(Case(f"8B long {name}", 2, f"{long} data.batch_size=2 {mesh}", xla, 2,
                      "8B long one", traced))  # fmt: skip
    found.append(Case(f"8B longer {name}", 2, f"{longer} data.batch_size=1 {mesh}", xla, 1,
                      traced=name == "qkv copies"))  # fmt: skip
  staged = "data.batch_size=16 step.accum_steps=8 mesh.stage=2"
  two, ways = "mesh.stage_rounds=2", {"loop": 1, "unrolled": 32}
  schedules = {
    "stage": "",
    "rounds": two,
    "kept": f"{two} step.remat=none step.remat_stages=names",
  }
  found += [
    Case(f"{model} {name} {way}", 2, f"{staged} {settings} step.scan_unroll={unroll}", "", 2,
         f"{model} one")
    for model in ("8B", "1.5B")
    for name, settings in schedules.items()
    for way, unroll in ways.items()
  ]  # fmt: skip
  for way, unroll in ways.items():  # of accumulation
    of_one = f"step.accum_steps=2 step.scan_unroll={unroll}"
    found += [
      Case(f"1.5B sums {way}", 1, f"data.batch_size=16 {of_one}", steps=6),
      Case(f"16 sums {way}", 1, f"data.batch_size=8 {of_one}", NO_TRITON, steps=6),
      Case(f"1.5B summed {way}", 2, f"data.batch_size=32 {fsdp} {of_one}", steps=6),
    ]
  found += [
    Case("16 one", 1, "data.batch_size=4", NO_TRITON),
    Case("5B one", 1, "data.batch_size=4", steps=6),
    Case("1.5B copies", 2, f"data.batch_size=16 {copies}", like="1.5B one"),
    Case("8B copies", 2, f"data.batch_size=8 {copies}", steps=5, like="8B one"),
    Case("experts copies", 2, f"data.batch_size=8 {copies}", NO_TRITON, like="experts one"),
  ]
  for name, mesh in (("", "none"), (" fp8", "fp8")):
    settings = f"data.batch_size=16 mesh.compress_gradients={mesh}"
    found.append(Case(f"1.5B replicas{name}", 2, settings, like="1.5B one"))
  for name, mesh in (("keep", keep), ("copies", copies)):
    found.append(Case(f"5B {name}", 2, f"data.batch_size=8 {mesh}", steps=6, like="5B one"))
  names = {"one": "data.batch_size=8", "fsdp": fsdp, "keep": keep, "copies": copies}
  for name, mesh in names.items():
    rows = "" if name == "one" else "data.batch_size=16 "
    found.append(Case(f"1.5B 8bit {name}", 1 if name == "one" else 2,
                      f"{rows}{mesh} precision.fp8=true", like="1.5B 8bit one"))  # fmt: skip
  for name, mesh in (("fsdp", fsdp), ("keep", keep), ("copies", copies)):
    found.append(Case(f"16 {name}", 2, f"data.batch_size=8 {mesh}", NO_TRITON, like="16 one"))
  found += [
    Case(f"{model} {way}", 2, f"data.batch_size=8 mesh.expert=2 moe.exchange={way}",
         NO_TRITON, like=f"{model} one")
    for model in ("experts", "16")
    for way in (
      "allgather", "allgather moe.exchange.factor=1.25",
      "hierarchical moe.exchange.hosts=2",
      "allgather moe.exchange.factor=1.25 mesh.keep_gathered=true mesh.copy_engines=true",
    )
  ]  # fmt: skip
  found += four() + eight()
  chosen = _CASES.value or [""]
  begins = lambda case, name: f"{case.name} ".startswith(f"{name} ".lstrip())
  order = [next((i for i, name in enumerate(chosen) if begins(c, name)), -1) for c in found]
  return [
    case for at, case in sorted(zip(order, found, strict=True), key=lambda x: x[0]) if at >= 0
  ]


def four() -> list[Case]:
  """Cases of four GPUs, with as many rows on each as the case of one GPU has."""
  fsdp, keep = "mesh.fsdp=4", "mesh.fsdp=4 mesh.keep_gathered=true"
  meshes = {
    "fsdp": fsdp,
    "keep": keep,
    "copies": f"{keep} mesh.copy_engines=true",
    "hsdp": "mesh.data=2 mesh.fsdp=2",
    "tensor": "mesh.tensor=2 mesh.fsdp=2",
    "stages": "mesh.stage=2 mesh.fsdp=2 step.accum_steps=8",
    "pipeline": "mesh.stage=4 step.accum_steps=16",
  }
  rows = {"1.5B": 32, "5B": 16, "8B": 8, "16": 16}
  staged = {"stages", "pipeline"}  # with as many rows a micro-batch as the case of one GPU has
  cases = [
    Case(f"{model} four {name}", 4,
         f"data.batch_size={32 if name in staged else number} {mesh}",
         NO_TRITON if model == "16" else "", 6, f"{model} one", traced=model == "16")
    for model, number in rows.items()
    for name, mesh in meshes.items()
    if model not in ("16", "5B") or name in ("fsdp", "keep", "copies")
  ]  # fmt: skip
  for name, mesh in (("stages", "mesh.stage=2 mesh.fsdp=2"), ("pipeline", "mesh.stage=4")):
    kept = f"{mesh} mesh.stage_rounds=2 step.remat=none step.remat_stages=names"
    number = 8 if name == "stages" else 16
    cases.append(Case(f"1.5B four {name} kept", 4,
                      f"data.batch_size=32 {kept} step.accum_steps={number}", "", 6, "1.5B one",
                      traced=False))  # fmt: skip
  cases.append(Case("1.5B 8bit four", 4, f"data.batch_size=32 {meshes['copies']} "
                    "precision.fp8=true", "", 6, "1.5B 8bit one", traced=False))  # fmt: skip
  exchanges = {
    "expert": "mesh.expert=4 moe.exchange.factor=1.25",
    "two": "mesh.expert=2 mesh.fsdp=2 moe.exchange.factor=1.25",
    "expert copies": "mesh.expert=4 moe.exchange.factor=1.25 mesh.keep_gathered=true "
    "mesh.copy_engines=true",
  }
  cases += [
    Case(f"16 four {name}", 4, f"data.batch_size=16 {mesh}", NO_TRITON, 6, "16 one", traced=False)
    for name, mesh in exchanges.items()
  ]
  sharded = {name: meshes[name] for name in ("fsdp", "keep", "copies")}
  cases.append(Case("half one", 1, "data.batch_size=4", NO_TRITON, traced=False))
  for model in ("half", "fine", "experts"):
    cases += [
      Case(f"{model} four {name}", 4, f"data.batch_size=16 {mesh}", NO_TRITON, 6,
           "half one" if model == "half" else "", traced=False)
      for name, mesh in (sharded | exchanges).items()
    ]  # fmt: skip
  eight = f"{meshes['copies']} precision.fp8=true"
  cases += [
    Case("8B four 8bit", 4, f"data.batch_size=8 {eight}", "", 6, traced=False),
    Case("14B four fsdp", 4, "data.batch_size=4 mesh.fsdp=4", "", 20, traced=False),
    Case("30B four fsdp", 4, "data.batch_size=4 mesh.fsdp=4", "", 20, traced=False),
    Case(
      "30B four short", 4, "data.batch_size=4 data.seq_len=1024 mesh.fsdp=4", "", 20, traced=False
    ),
    Case(
      "30B four loop",
      4,
      "data.batch_size=4 data.seq_len=1024 mesh.fsdp=4 step.scan_unroll=1",
      "",
      20,
      traced=False,
    ),
  ]
  ways = {"swap": "", "copies": "mesh.copy_engines=true"}
  cases += [
    Case(f"{model} four {size} {name}", 4,
         f"data.seq_len={length} data.batch_size={4 * 32_768 // length} step.remat=qkv "
         f"mesh.context=4 {way}", "", 2, traced=name == "swap")
    for model in ("1.5B", "8B")
    for size, length in (("long", 32_768), ("longer", 131_072))
    for name, way in ways.items()
  ]  # fmt: skip
  return cases


def eight() -> list[Case]:
  """Cases of eight GPUs of one machine, which no such machine has run yet."""
  copies = "mesh.fsdp=8 mesh.keep_gathered=true mesh.copy_engines=true"
  meshes = {
    "fsdp": "mesh.fsdp=8",
    "copies": copies,
    "hsdp": "mesh.data=2 mesh.fsdp=4",
    "tensor": "mesh.tensor=2 mesh.fsdp=4",
  }
  cases = [
    Case(f"{model} eight {name}", 8, f"data.batch_size={rows} {mesh}", "", 6, f"{model} one",
         traced=False)
    for model, rows in (("1.5B", 64), ("8B", 32))
    for name, mesh in meshes.items()
  ]  # fmt: skip
  spread = {name: meshes[name] for name in ("fsdp", "copies")}
  spread |= {
    "expert": "mesh.expert=8 moe.exchange.factor=1.25",
    "two": "mesh.expert=2 mesh.fsdp=4 moe.exchange.factor=1.25",
  }
  cases += [
    Case(f"{model} eight {name}", 8, f"data.batch_size=32 {mesh}", NO_TRITON, 6,
         "experts one" if model == "experts" else "", traced=False)
    for model in ("experts", "fine")
    for name, mesh in spread.items()
  ]  # fmt: skip
  longer = "data.seq_len=131072 data.batch_size=1 step.remat=qkv mesh.context=8"
  cases += [
    Case(f"{model} eight longer", 8, longer, "", 2, traced=False) for model in ("1.5B", "8B")
  ]
  return cases


_OUT = flags.DEFINE_string("out", None, "Folder of results.")
_CASES = flags.DEFINE_list("cases", [], "First words of names; none = all.")
_BUDGET = flags.DEFINE_float("budget_secs", 560.0, "Nothing runs past it.", lower_bound=10.0)
_COMPILE = flags.DEFINE_float("compile_secs", 260.0, "That compiling may take.", lower_bound=1.0)
_AT_ONCE = flags.DEFINE_integer("at_once", 12, "Processes that compile.", lower_bound=1)
_DUMP = flags.DEFINE_string("dump", "", "Name of the case whose buffers are kept.")
_GPUS = flags.DEFINE_integer("gpus", 2, "That the machine has.", lower_bound=1)
_TOY = flags.DEFINE_bool("toy", False, "Small models on this machine's CPU.")
_WORKER = flags.DEFINE_enum("worker", "", ["", "compile", "time"], "What a process of a case does.")
_TRACE = flags.DEFINE_string("trace", "", "Name of the case whose trace is kept.")
_TRACED = flags.DEFINE_bool("traced", True, "Whether a worker traces two more steps.")
_EARLY = flags.DEFINE_bool("early", False, "Whether a worker compiles before it waits.")
_STEPS = flags.DEFINE_integer("steps", 12, "Of a worker's timed round.")


def work(settings: list[str]) -> None:
  """What a process of a case does; the last line that it prints is JSON."""
  import jax

  from ats_jax.cluster import runtime
  from ats_jax.data.batch import random_batch
  from ats_jax.metrics.memory import GIB, memory_metrics
  from ats_jax.metrics.peaks import peak_flops
  from ats_jax.metrics.throughput import mfu
  from ats_jax.planner.abstract import resolve_without_data
  from ats_jax.planner.describe import describe, planned_bytes
  from ats_jax.sharding.mesh import local_rows, make_mesh, on_mesh, to_global
  from ats_jax.step.program import make_program, predicted_bytes
  from ats_jax.verbs import cli

  values = flags.FlagValues()
  config = cli.ConfigFlag(values)
  values(["case", "--config=configs/dense_1_5b.py", *settings])
  cfg = resolve_without_data(config.value)
  if _WORKER.value == "time" and not _EARLY.value:
    wait()
  found: dict[str, Any] = {}
  with runtime.configured(cfg):
    found["planned_gib"] = planned_bytes(describe(cfg, jax.device_count())) / GIB
    mesh = make_mesh(cfg)
    with on_mesh(cfg, mesh):
      program = make_program(cfg)
      began = time.time()
      step = program.compile_train_step(
        program.init(abstract=True), program.training_rules(cfg.num_steps)
      )
      found["compile_secs"] = time.time() - began
      found["compiled_gib"] = predicted_bytes(step) / GIB
      if _WORKER.value == "compile":
        print(json.dumps(found), flush=True)
        return
      if _EARLY.value:
        wait()
      state = jax.block_until_ready(program.init())
      rows = local_rows(mesh, cfg.data.batch_size // cfg.step.accum_steps)
      shape = (cfg.step.accum_steps, len(rows), cfg.data.seq_len)
      batch = to_global(random_batch(shape, cfg.model.vocab_size, 1), mesh)
      losses, rounds = [], []
      for _ in range(2 if _STEPS.value > 2 else 1):
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
      for _ in range(2):
        began = time.perf_counter()
        for _ in range(_STEPS.value):
          state, metrics = step(state, batch)
        jax.block_until_ready(state)
        rounds.append((time.perf_counter() - began) / _STEPS.value)
      found |= memory_metrics()
      if _TRACED.value:
        found |= traced(lambda state: step(state, batch)[0], state)
  tokens, secs = cfg.data.batch_size * cfg.data.seq_len, min(rounds)
  counts, devices = program.counts, jax.device_count()
  peak = peak_flops(jax.devices()[0].device_kind, cfg.precision.compute_dtype)
  found |= {
    "device": f"{devices} x {jax.devices()[0].device_kind}", "parameters": counts.parameters,
    "rounds_ms": [1e3 * secs for secs in rounds], "tokens_per_sec": tokens / secs,
    "mfu": mfu(counts.flops_causal, tokens / secs, devices, peak), "losses": losses,
  }  # fmt: skip
  print(json.dumps(found), flush=True)


def traced(step: Callable, state: Any) -> dict[str, Any]:
  """What a trace of two steps says of the GPUs' time."""
  import jax

  from ats_jax.metrics import profiler

  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    with jax.profiler.trace(name):
      for _ in range(min(2, _STEPS.value)):
        state = step(state)
      jax.block_until_ready(state)
    if _TRACE.value:
      (trace,) = folder.glob("**/*.xplane.pb")
      Path(_TRACE.value).write_bytes(gzip.compress(trace.read_bytes(), 6))
    kernels = [(k.name[:120], k.calls, 1e3 * k.secs) for k in profiler.kernel_times(folder)]
    return {"spans": [s._asdict() for s in profiler.spans(folder)], "kernels": kernels[:60]}


def wait() -> None:
  """Say that all is ready, and wait for a line."""
  print("ready", flush=True)
  sys.stdin.readline()


class Lab:
  """Processes of cases, and what they found.

  Attributes:
    out: the folder of results.
    scratch: for the compilation cache and dumps.
    speeds: tokens a second of each GPU, by case.
  """

  def __init__(self, out: Path, scratch: Path):
    """Begin to count the budget."""
    self.out, self.scratch = out, scratch
    self.speeds = collections.defaultdict[str, list[float]](list)
    self._began, self._lock = time.time(), threading.Lock()

  @property
  def until(self) -> float:
    """When nothing may run any more."""
    return self._began + _BUDGET.value

  def row(self, what: str, case: Case, **found: Any) -> None:
    """Write a row, and show it without its lists."""
    at = round(time.time() - self._began, 1)
    with self._lock, (self.out / "results.jsonl").open("a") as file:
      file.write(json.dumps({"what": what, "name": case.name, "at": at, **found}) + "\n")
    shown = {k: v for k, v in found.items() if k not in ("kernels", "spans")}
    print(f"{at:6.1f} {what} {case.name}: {shown}", flush=True)

  def start(self, case: Case, worker: str, gpu: int) -> Child:
    """A process of a case, whose first GPU is the one of that number."""
    env = {"XDG_CACHE_HOME": str(self.scratch / "cache")}
    # There is room beside the case before it, but for the longest rows, which need all of a GPU.
    early = worker == "time" and case.devices > 1 and "longer" not in case.name
    if _TOY.value:
      xla = f"--xla_force_host_platform_device_count={case.devices}"
      env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla}
    else:
      env["CUDA_VISIBLE_DEVICES"] = ",".join(
        str((gpu + n) % _GPUS.value) for n in range(case.devices)
      )
      if worker == "compile" or early:
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
      if worker == "compile" and case.name == _DUMP.value:
        env["XLA_FLAGS"] = f"--xla_dump_to={self.scratch}/dump"
    trace = self.out / "trace.xplane.pb.gz" if case.name == _TRACE.value else ""
    command = [
      sys.executable, __file__, f"--worker={worker}", f"--steps={case.steps}", f"--early={early}",
      f"--traced={case.traced}", f"--trace={trace}", f"--toy={_TOY.value}", "--", *case.flags,
    ]  # fmt: skip
    return Child(command, env)

  def result(self, case: Case, child: Child, until: float) -> dict[str, Any]:
    """What a process found; the log gets the end of what it printed."""
    try:
      code = child.ended(until)
    except TimeoutError as error:
      code = str(error)
    finally:
      child.end()
      text = child.text()
      with self._lock, (self.out / "log.txt").open("a") as file:
        file.write(f"\n===== {case.name}\n{text[-6000:]}\n")
    found = re.findall(r"^\{.*\}$", text, re.M)
    return json.loads(found[-1]) if code == 0 and found else {"failed": code, "end": text[-300:]}

  def compile(self, case: Case, number: int, like: Future | None) -> bool:
    """Whether its step is in the cache now; that of `like`, which shares matmuls, first."""
    if like is not None and "d_ff=7168" not in MODELS[case.name.split()[0]]:
      like.result()
    child = self.start(case, "compile", number % _GPUS.value)
    found = self.result(case, child, min(self.until, self._began + _COMPILE.value))
    self.row("compiled", case, **found)
    return "failed" not in found

  def time(self, cases: list[Case], gpu: int = 0) -> None:
    """Time cases one after the other; the next one gets ready meanwhile."""
    coming = None
    for case, following in itertools.zip_longest(cases, cases[1:]):
      child, coming = coming or self.start(case, "time", gpu), None
      try:
        child.when("^ready", self.until)
        child.go_on()
        coming = following and self.start(following, "time", gpu)
        found = self.result(case, child, self.until)
      except (ChildProcessError, TimeoutError) as error:
        found: dict[str, Any] = {"failed": str(error)}
        child.end()
      if speed := found.get("tokens_per_sec"):
        self.speeds[case.name].append(speed)
        if case.devices > 1 and (alone := self.speeds[case.like]):
          found["of_all"] = speed / (case.devices * sum(alone) / len(alone))
          found["of_slowest"] = speed / (case.devices * min(alone))
      self.row("timed", case, gpu=gpu, **found)


def main(argv: list[str]) -> None:
  """Compile, then time."""
  if _WORKER.value:
    work(argv[1:])
    return
  out = Path(_OUT.value).resolve()
  out.mkdir(parents=True, exist_ok=True)
  chosen = cases()
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
    lab, futures = Lab(out, Path(scratch)), dict[str, Future]()
    with ThreadPoolExecutor(_AT_ONCE.value) as pool:
      for number, case in enumerate(chosen):
        like = futures.get(case.like)
        futures[case.name] = pool.submit(lab.compile, case, number, like)
    for file in lab.scratch.glob("dump/*train_step*buffer-assignment.txt"):
      with file.open("rb") as source, gzip.open(out / "buffers.txt.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    todo = [case for case in chosen if futures[case.name].result()]
    gpus = range(_GPUS.value)
    with ThreadPoolExecutor(len(gpus)) as pool:
      singles = [case for case in todo if case.devices == 1]
      list(pool.map(lab.time, [singles for _ in gpus], gpus))
    lab.time([case for case in todo if case.devices > 1])


if __name__ == "__main__":
  app.run(main)
