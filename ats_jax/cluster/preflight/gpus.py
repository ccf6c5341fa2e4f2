"""NVIDIA GPUs as `nvidia-smi` tells of them: health, links, and the mesh that suits the links."""

import csv
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Sequence

from ats_jax.cluster.preflight.results import CheckResult, CheckVerdict, check_result

_QUERY = (
  "index", "name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm",
  "clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total", "temperature.gpu",
  "power.limit", "power.default_limit", "compute_mode", "mig.mode.current",
)  # fmt: skip
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
_TIMEOUT_SECS = 30
# Bits of clocks_throttle_reasons.active that cost speed (nvml.h); an idle GPU has bit 1.
_THROTTLES = {
  0x4: "power cap",
  0x8: "hardware slowdown",
  0x20: "too hot",
  0x40: "too hot (hardware)",
  0x80: "power brake",
}
# At most so much of a GPU's memory is in use by others, in MiB, before it is said.
_IDLE_MIB = 1024
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A line of `QUERY`; what the driver does not say is None.

  Attributes:
    index: number of the GPU on this machine.
    name: name of the card, as the driver calls it.
    driver: version of that.
    memory_mib: memory of the device.
    used_mib: by all processes.
    clock_mhz: now.
    max_clock_mhz: at most.
    throttles: why the clock is lower than it could be.
    ecc_errors: memory errors since the driver was loaded that could not be corrected.
    celsius: temperature.
    watts: power limit.
    default_watts: power limit as it left the factory.
    exclusive: whether one process at a time may use it.
    mig: whether it is cut into slices.
  """

  index: int
  name: str
  driver: str
  memory_mib: float | None
  used_mib: float | None
  clock_mhz: float | None
  max_clock_mhz: float | None
  throttles: tuple[str, ...]
  ecc_errors: float | None
  celsius: float | None
  watts: float | None
  default_watts: float | None
  exclusive: bool
  mig: bool


def output_of(command: Sequence[str]) -> str | None:
  """What a command prints; None where there is no such command, or it fails or hangs."""
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=_TIMEOUT_SECS, check=False
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout if done.returncode == 0 else None


def parse_gpus(text: str) -> list[Gpu]:
  """The GPUs of `QUERY`'s output.

  Raises:
    ValueError: if a line has another number of fields.
  """
  gpus = []
  for cells in csv.reader(text.strip().splitlines(), skipinitialspace=True):
    if len(cells) != len(_QUERY):
      raise ValueError(f"nvidia-smi: expected {len(_QUERY)} fields in {cells}")
    of = dict(zip(_QUERY, (cell.strip() for cell in cells), strict=True))
    reasons = of["clocks_throttle_reasons.active"]
    mask = int(reasons, 16) if reasons.startswith("0x") else 0
    gpu = Gpu(
      index=int(of["index"]),
      name=of["name"],
      driver=of["driver_version"],
      memory_mib=_number(of["memory.total"]),
      used_mib=_number(of["memory.used"]),
      clock_mhz=_number(of["clocks.sm"]),
      max_clock_mhz=_number(of["clocks.max.sm"]),
      throttles=tuple(why for bit, why in _THROTTLES.items() if mask & bit),
      ecc_errors=_number(of["ecc.errors.uncorrected.volatile.total"]),
      celsius=_number(of["temperature.gpu"]),
      watts=_number(of["power.limit"]),
      default_watts=_number(of["power.default_limit"]),
      exclusive=of["compute_mode"].startswith("Exclusive"),
      mig=of["mig.mode.current"] == "Enabled",
    )
    gpus.append(gpu)
  return gpus


def _number(cell: str) -> float | None:
  try:
    return float(cell)
  except ValueError:  # [N/A], [Not Supported]
    return None


def gpu_rows(gpus: Sequence[Gpu]) -> list[CheckResult]:
  """A row a GPU."""
  return [_gpu_row(gpu) for gpu in gpus]


def _gpu_row(gpu: Gpu) -> CheckResult:
  show = lambda number, unit: "?" if number is None else f"{number:,.0f}{unit}"
  facts = [
    gpu.name,
    f"{show(gpu.memory_mib, ' MiB')} ({show(gpu.used_mib, '')} in use)",
    f"clock {show(gpu.clock_mhz, '')} of {show(gpu.max_clock_mhz, ' MHz')}",
    f"{show(gpu.celsius, ' C')}",
    f"power limit {show(gpu.watts, ' W')}",
    "no ECC" if gpu.ecc_errors is None else f"ECC errors {gpu.ecc_errors:.0f}",
    *gpu.throttles,
  ]
  problems, bad = [], bool(gpu.ecc_errors)
  if gpu.ecc_errors:
    problems.append("Its memory has lost bits: drain the machine and replace or reset the GPU.")
  if gpu.throttles:
    problems.append(f"It runs slower than it can ({', '.join(gpu.throttles)}): cooling or power.")
  if (gpu.used_mib or 0) > _IDLE_MIB:
    problems.append("Another process holds memory: `nvidia-smi` lists who.")
  if gpu.watts and gpu.default_watts and gpu.watts < gpu.default_watts:
    problems.append(f"Its power limit is below the usual {gpu.default_watts:,.0f} W.")
  if gpu.mig:
    problems.append("MIG is on: no NVLink between slices; switch it off for training.")
  if gpu.exclusive:
    problems.append("One process at a time may use it (exclusive mode).")
  return check_result(f"GPU {gpu.index}", ", ".join(facts), problems, bad)


def no_gpu_row(command: Sequence[str] = QUERY) -> CheckResult:
  """Why there are none to tell of."""
  if shutil.which(command[0]) is None:
    return CheckResult("GPUs", f"there is no {command[0]}", CheckVerdict.NONE)
  advice = f"Run it to see why: {command[0]}; a driver may be missing, or too old for the question."
  return CheckResult("GPUs", f"{command[0]} tells of none", CheckVerdict.ADVICE, advice)


Links = dict[tuple[int, int], str]


def parse_topology(text: str) -> Links:
  """The link of each pair of GPUs in `TOPOLOGY`'s output: {(0, 1): "NV18", ...}, both ways."""
  rows, columns = {}, []
  for line in _ESCAPES.sub("", text).splitlines():
    words = line.split()
    if words[:1] == ["Legend:"]:
      break
    names = [word for word in words if re.fullmatch(r"GPU\d+", word)]
    if names and not columns and len(names) == _leading(words):
      columns = [int(name.removeprefix("GPU")) for name in names]
    elif names and words[0] == names[0]:
      rows[int(names[0].removeprefix("GPU"))] = words[1 : 1 + len(columns)]
  return {
    (row, column): link
    for row, links in rows.items()
    for column, link in zip(columns, links, strict=False)
    if row != column
  }


def _leading(words: Sequence[str]) -> int:
  """How many of the first words are GPUs; in the header all GPUs come first."""
  count = 0
  while count < len(words) and re.fullmatch(r"GPU\d+", words[count]):
    count += 1
  return count


def islands(links: Links) -> list[list[int]]:
  """GPUs that reach each other over NVLink without a detour, the largest group first."""
  left, groups = sorted({gpu for pair in links for gpu in pair}), []
  while left:
    group = [left[0]]
    for gpu in left[1:]:
      if all(links.get((gpu, other), "").startswith("NV") for other in group):
        group.append(gpu)
    groups.append(group)
    left = [gpu for gpu in left if gpu not in group]
  return sorted(groups, key=lambda group: (-len(group), group))


def topology_row(links: Links) -> CheckResult:
  """What links there are, and the mesh that suits them."""
  groups = islands(links)
  count, size = sum(map(len, groups)), len(groups[0])
  kinds = sorted(set(links.values()))
  text = f"{count} GPUs, links {', '.join(kinds)}"
  if size == count:
    return CheckResult(
      "links", f"{text}: all over NVLink", CheckVerdict.OK,
      f"Any mesh suits: mesh.fsdp={count}, or mesh.tensor and mesh.expert within these {count}.",
    )  # fmt: skip
  if size == 1:
    advice = (
      "No NVLink: what talks least is best. mesh.data where a model fits on one GPU, else "
      "mesh.fsdp; keep mesh.tensor and mesh.expert at 1."
    )
    return CheckResult("links", f"{text}: PCIe only", CheckVerdict.ADVICE, advice)
  listing = "; ".join(", ".join(map(str, group)) for group in groups)
  if all(len(group) == size for group in groups):
    advice = (
      f"mesh.data={len(groups)} between groups, at most {size} of fsdp, expert and tensor within."
    )
  else:
    advice = f"The groups differ: train on the {size} of the largest, or mesh.fsdp over all."
  order = [gpu for group in groups for gpu in group]
  if order != sorted(order):
    advice += f" Neighbours first: CUDA_VISIBLE_DEVICES={','.join(map(str, order))}."
  return CheckResult("links", f"{text}: NVLink within ({listing})", CheckVerdict.ADVICE, advice)
