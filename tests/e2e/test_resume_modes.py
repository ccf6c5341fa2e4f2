"""A run killed as its data is prepared and as its phases change goes on bit for bit.

Texts, then conversations, with filters, packing, loader processes and new moments at the change; a
text that is tokenised while it is read. Other kinds resume in tests/unit/train.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import runs
from commands import forked, train_flags

STEPS, SWITCH = 12, 6  # the phases change behind SWITCH, where a checkpoint is due too
SETTINGS = (
  *runs.TINY,
  f"num_steps={STEPS}",
  "data.packing=best_fit",
  "data.seq_len=64",
  "data.batch_size=8",
  "data.num_workers=2",
  "step.accum_steps=2",
  "checkpoint.every_steps=3",
  "eval.every_steps=6",
  "eval.num_batches=2",
  "sample.max_tokens=0",
)
# Shards of a few kilobytes, and an end by SIGKILL as shard number KILL_AT is about to be counted.
CONFIG = """
import os, signal, sys

from configs.debug import get_config as debug
from ats_jax.config.schema.mixture import Phase
from ats_jax.data.corpus import shards, tokenise
from ats_jax.data.chat import corpus

shards.SHARD_TOKENS = 3000
tokenise._BATCH_CHARS = corpus._BATCH_CHARS = 1000


def die(event, arguments, seen=[0]):
  if event == "os.rename" and "/part-" in str(arguments[0]):
    seen[0] += 1
    if seen[0] == int(os.environ.get("KILL_AT", 0)):
      os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(die)
SWITCH, TEXT, CHAT = 6, {"base": 1}, {"chat": 1}
PHASES = {
  "": (),
  "sequential": (
    Phase(TEXT, steps=SWITCH, learning_rate=3e-3, warmup_steps=2),
    Phase(CHAT, learning_rate=1e-4, warmup_steps=2),
  ),
}


def get_config(variant: str = ""):
  config = debug()
  config.data.phases = PHASES[variant]
  return config
"""


class Mode(NamedTuple):
  """Paths or sources, with `{}` for the folder of the texts, and further settings.

  `variant` is of the config.
  """

  paths: str
  settings: tuple[str, ...]
  variant: str = ""


MODES = {
  "sequential": Mode(
    "base={0}/base.jsonl,chat={0}/chat.jsonl",
    (
      "data.filters=exact", "data.format=chat", "data.format.sources=chat",
      "optimizer.phase_moments=reset",
    ),
    "sequential",
  ),
  "streaming": Mode(
    "{0}/base.jsonl",
    (
      "data.reading=streaming", "data.reading.window_mb=0.002", "data.validation_fraction=0",
      "eval.every_steps=0", "eval.num_batches=0",
    ),
  ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
  """Texts with copies, conversations, and the config."""
  folder = tmp_path_factory.mktemp("texts")
  texts = [{"text": f"text {i % 70}: " + "the quick é fox. " * (i % 9)} for i in range(90)]
  turns = lambda i: [("user", f"what is {i}?"), ("assistant", f"{i} " * (1 + i % 5))]
  chats = [{"messages": [dict(role=r, content=c) for r, c in turns(i)]} for i in range(120)]
  for name, rows in (("base", texts), ("chat", chats)):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (folder / "config.py").write_text(CONFIG)
  return folder


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["sequential", pytest.param("streaming", marks=pytest.mark.slow)])
def test_killed_at_its_worst_moments(folder, tmp_path, mode):
  paths, settings, variant = MODES[mode]
  named = f"{'data.sources' if variant else 'data.paths'}={paths.format(folder)}"
  config = f"{folder}/config.py:{variant}".removesuffix(":")
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  given = lambda workdir: (*SETTINGS, *settings, named, f"data.cache_dir={workdir}.cache")

  def finish(workdir: Path, kill_at: int = 0):
    flags = train_flags(workdir, *given(workdir), config=config)
    return forked("ats_jax.train", *flags, KILL_AT=str(kill_at))

  result = finish(whole)
  assert result.code == 0, result.err
  assert (mode == "sequential") == ("phase 2 of 2 of data.phases begins" in result.err)

  assert finish(broken, kill_at=2).code == -signal.SIGKILL
  assert list(tmp_path.glob("broken.cache/**/corpus-*.tmp"))

  process = runs.start(broken, *given(broken), config=config)
  killed_in = runs.kill_while_writing(process, broken, after_step=SWITCH - 1)
  assert killed_in.split(".")[0] == str(SWITCH)

  if mode == "streaming":  # as on another machine
    shutil.rmtree(tmp_path / "broken.cache")
  result = finish(broken)
  assert result.code == 0 and f"resuming {broken} from step" in result.err, result.err
  runs.assert_same_run(whole, broken, STEPS)
