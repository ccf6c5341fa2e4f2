"""How many files does one thing go through? Counted in a run, not by reading.

python -m lab.walks

batch: files of the package that a function is entered in while a dense model trains for two steps,
  from text files to a checkpoint.
rate, capacity: files in which a function is handed the action that cuts the learning rate, or the
  one that gives experts more room, asked for by a hook, until it is done.
action: files of the package that name an action's class (`SetWeightDecay`), and how often.
"""

import ast
import dataclasses
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ats_jax.config import from_config_dict
from ats_jax.orchestrator import hooks
from ats_jax.orchestrator.actions import ChangeSettings, SetLearningRateScale
from ats_jax.store import paths
from ats_jax.train.loop import train

PACKAGE = Path(sys.modules["ats_jax"].__path__[0])
DEPTH = 2  # of tuples and dataclasses that are looked into for an action
STEPS = 12
SMALL = {
  "compilation_cache": "off",
  "model": dict(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64),
  "optimizer": dict(warmup_steps=1),
  "eval": dict(every_steps=0, bigram_baseline=False),
  "sample": dict(max_tokens=0),
  "log": dict(progress=False, writers="jsonl"),
}


@contextmanager
def entered(counts: Callable[[FrameType], bool]) -> Iterator[set[str]]:
  """The files of the package whose functions are called meanwhile, if `counts(frame)`."""
  found: set[str] = set()

  def look(frame: FrameType, event: str, arg: object) -> None:
    del arg
    name = frame.f_code.co_filename
    inside = name.startswith(f"{PACKAGE}{os.sep}") and frame.f_code.co_name != "<module>"
    if event == "call" and inside and counts(frame):
      found.add(os.path.relpath(name, PACKAGE))

  threading.setprofile(look)
  sys.setprofile(look)
  try:
    yield found
  finally:
    sys.setprofile(None)
    threading.setprofile(None)


def holds(value: Any, kind: type, depth: int = DEPTH) -> bool:
  """Whether `value` is an action of that kind, or one stands in it."""
  if isinstance(value, kind):
    return True
  if depth == 0:
    return False
  if isinstance(value, tuple | list):
    return any(holds(v, kind, depth - 1) for v in value)
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    values = (getattr(value, field.name, None) for field in dataclasses.fields(value))
    return any(holds(v, kind, depth - 1) for v in values)
  return False


def handed(kind: type) -> Callable[[FrameType], bool]:
  """Whether a function is called with an action of that kind."""
  return lambda frame: any(
    holds(frame.f_locals.get(name), kind)
    for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]
  )


def run(texts: Path, **sections: Any) -> None:
  """Train for a few steps in a folder of its own."""
  data = dict(
    paths=str(texts),
    seq_len=32,
    batch_size=8,
    tokenizer="bytes",
    num_workers=0,
    validation_fraction=0.3,
  )
  with tempfile.TemporaryDirectory() as folder:
    data["cache_dir"] = f"{folder}/cache"
    merged = {**SMALL, "data": data, **sections}
    train(from_config_dict(merged), paths.Path(folder) / "run")


def of_action(texts: Path, action: Any, **sections: Any) -> set[str]:
  """The files that an action goes through, asked for at the first look."""
  asked: list[int] = []

  def ask(look: hooks.Look) -> Any:
    if asked:
      return None
    asked.append(look.step)
    return action

  hooks.register(ask)
  watched = dict(mode="act", check_interval=2, snapshot_interval=2)
  try:
    with entered(handed(type(action))) as found:
      run(texts, num_steps=STEPS, orchestrator=watched, **sections)
  finally:
    hooks.unregister(ask)
  return found


def names_of(name: str) -> dict[str, int]:
  """Files of the package that name a class, and how often each does."""
  counts = {}
  for path in sorted(PACKAGE.rglob("*.py")):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    count = sum(isinstance(n, ast.Name) and n.id == name for n in nodes)
    count += sum(isinstance(n, ast.ClassDef | ast.alias) and n.name == name for n in nodes)
    if count:
      counts[str(path.relative_to(PACKAGE))] = count
  return counts


def main() -> None:
  """Print each walk."""
  with tempfile.TemporaryDirectory() as folder:
    texts = Path(folder)
    for number in range(40):
      (texts / f"{number}.txt").write_text("some words that come again and again. " * 20)
    with entered(lambda frame: True) as batch:
      run(texts, num_steps=2)
    rate = of_action(texts, SetLearningRateScale(0.5))
    experts = dict(num_experts=4, top_k=2, dispatch="capacity", d_ff=32)
    settings = (("moe.capacity_factor", 2.0),)
    capacity = of_action(texts, ChangeSettings(settings), moe=experts)
  sites = names_of("SetWeightDecay")
  for name, files in (("batch", batch), ("rate", rate), ("capacity", capacity)):
    print(f"{name}: {len(files)} files\n  {' '.join(sorted(files))}")
  print(f"action: {sum(sites.values())} sites in {len(sites)} files\n  {sites}")
  lines = sum(len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py"))
  print(f"package: {lines} lines")


if __name__ == "__main__":
  main()
