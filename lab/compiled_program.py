"""What the text of a compiled program says of it; and tables of such findings."""

import collections
import csv
import math
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

MATMUL = r"custom_call_target=\"(__(cublas|cudnn)|mosaic_gpu)|__triton"
LONGEST = 5000  # characters of a line that are read; behind them are the insides of kernels
# Bytes that a device sends for each byte it gets, in units of (devices - 1).
SENT = {
  "all-gather": lambda ways: 1 / ways,
  "reduce-scatter": lambda ways: 1,
  "all-reduce": lambda ways: 2 / ways,
  "all-to-all": lambda ways: 1 / ways,
}
KINDS = "|".join(SENT)


def scores(program: str, seq: int, least: int = 0) -> set[str]:
  """Arrays in memory with two axes as long as a row, as those of attention's scores.

  What only exists within a fusion is in no memory. Scores of some queries of several heads may have
  such axes too, and weights; they are smaller.

  Args:
    program: a compiled one as text.
    seq: tokens of a row.
    least: numbers of an array that counts.
  """
  within = set(re.findall(r"\bcalls=%?([\w.-]+)", program))
  found, is_fusion = set(), False
  for line in program.splitlines():
    if head := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
      is_fusion = head[1] in within
    elif not is_fusion:
      shapes = re.findall(r"\b([a-z]+\d+\w*\[[\d,]+\])", line[:LONGEST])
      for shape in shapes:
        axes = [int(n) for n in re.findall(r"\d+", shape.partition("[")[2])]
        if axes.count(seq) > 1 and math.prod(axes) >= least:
          found.add(shape)
  return found


def traffic(program: str) -> collections.Counter[tuple[str, str]]:
  """Bytes that a device sends in a step through collectives outside of loops.

  Args:
    program: a compiled one as text, in the order in which it is run.

  Returns:
    By kind of collective, and by whether a matmul is between its start and its end.
  """
  lines = [line[:LONGEST] for line in program[program.index("\nENTRY") :].splitlines()]
  started, found = {}, collections.Counter()
  for number, line in enumerate(lines):
    if start := re.search(rf"%?(\S+) = (.*) ({KINDS})(-start)?\(", line):
      name, results, kind, runs_on = start.groups()
      results = results.split("), ", 1)[-1] if runs_on else results  # behind the arguments
      ways = _ways(line)
      sent = round(_bytes(results) * (ways - 1) * SENT[kind](ways))
      started[name] = number, kind, sent
      if not runs_on:
        found[kind, "beside none"] += sent
    if done := re.search(rf"({KINDS})-done\(.*?%?([\w.-]+)\)", line):
      began, kind, sent = started[done[2]]
      hidden = any(re.search(MATMUL, between) for between in lines[began:number])
      found[kind, "beside matmuls" if hidden else "beside none"] += sent
  return found


def _bytes(shapes: str) -> int:
  """Of arrays as HLO writes them."""
  arrays = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", shapes)
  length = lambda dims: math.prod(map(int, filter(None, dims.split(","))))
  return sum(max(1, int(bits or 8) // 8) * length(dims) for _, bits, dims in arrays)


def _ways(line: str) -> int:
  """How many devices a collective is among."""
  sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", line)}
  if sizes:
    axes = re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line)
    return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", axes[1])) if axes else 1
  groups = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
  return int(groups[1]) if groups else 1


def commit() -> str:
  """The commit of this repository, as a record names it; "-dirty" = files differ from it."""
  git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=8", "--dirty")
  return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def add_line(path: Path, row: Mapping[str, str]) -> None:
  """Add a line to a table (CSV), with its heading if it is new."""
  is_new = not path.exists()
  with path.open("a", encoding="utf-8", newline="") as file:
    writer = csv.DictWriter(file, list(row), lineterminator="\n")
    if is_new:
      writer.writeheader()
    writer.writerow(row)
