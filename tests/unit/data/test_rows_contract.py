"""The contract of rows: a kind that the package does not know, and nobody who asks which it is."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_config
from loading import assert_same, batches_of, read

import ats_jax
from ats_jax.data.batch import FIELDS
from ats_jax.data.look.audit import audit
from ats_jax.data.rows.contract import Info, Progress, TrainRows, leaf_rows
from ats_jax.data.rows.loader import eval_batches
from ats_jax.data.rows.mixture import Joined, Mixture
from ats_jax.data.rows.schedule import MixturePhase, Schedule
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.train import open as opening
from ats_jax.train.loop import train

KINDS = {"Dataset", "Joined", "Mixture", "Buckets", "Stream", "NoRows"}


class Counting(TrainRows):
  """Rows of no text: token p of row r is r + p."""

  def __init__(self, num_rows=10, seq_len=16):
    self.info = Info(ByteTokenizer(), seq_len, num_rows, num_rows * seq_len, num_rows,
                     fingerprint=f"counting {num_rows}", ids_used=256)  # fmt: skip

  def read_once(self, rows):
    row, at = np.asarray(rows)[..., None], np.arange(self.info.seq_len)
    tokens = (row + at) % 256
    values = {"tokens": tokens, "targets": (tokens + 1) % 256, "segment_ids": 1, "positions": at}
    values["loss_mask"] = row < self.info.num_rows
    return {
      name: np.broadcast_to(values[name], tokens.shape).astype(field.dtype)
      for name, field in FIELDS.items()
    }

  def read(self, rows):
    return self.read_once(np.asarray(rows) % self.info.num_rows)

  def progress(self, row, since=None):
    begins = since is not None and row // self.info.num_rows > since // self.info.num_rows
    return Progress(row / self.info.num_rows, news=["counted once more"] if begins else [])


def test_a_foreign_kind_goes_through_the_loader_and_on_where_it_was(caplog):
  with caplog.at_level("INFO", logger="absl"):
    whole, end = read(Counting(), 7, batch=4, tells=True)
  assert caplog.messages.count("counted once more") == 2
  assert [r for batch in whole for r in batch["tokens"][0, :, 0]] == [r % 10 for r in range(28)]
  _, position = read(Counting(), 3, batch=4, hosts=2)
  rest, end_of_rest = read(Counting(), 4, batch=4, position=position, hosts=3)
  assert_same(rest, whole[3:])
  assert end_of_rest == end
  with pytest.raises(ValueError, match="was trained on other data"):
    batches_of(Counting(11), position=position)
  local = np.arange(4)
  with eval_batches(Counting(), batch_size=4, local_rows=local, num_batches=0) as batches:
    assert sum(batch["loss_mask"].sum() for batch in batches) == 10 * 16


def test_a_foreign_kind_as_a_source_of_a_mixture():
  make = lambda: Mixture(
    {"a": Counting(10), "b": Counting(3)}, Schedule([MixturePhase((3, 1))]), ByteTokenizer()
  )
  whole, _ = read(make(), 6, batch=4)
  _, position = read(make(), 2, batch=4)
  assert_same(read(make(), 4, batch=4, position=position, hosts=2)[0], whole[2:])
  assert make().progress(24).passes == {"a": 1.8, "b": 2.0}
  joined = Joined({"a": Counting(10), "b": Counting(3)}, ByteTokenizer())
  rows = joined.read_once(range(13))["tokens"][:, 0]
  assert sorted(rows.tolist()) == sorted([*range(10), *range(3)])
  assert [name for name, _ in leaf_rows(make(), "train")] == ["train a", "train b"]


def test_what_looks_at_documents_says_that_there_are_none():
  with pytest.raises(ValueError, match="compares rows with documents, and these have none"):
    next(audit(Counting()))


def test_a_foreign_kind_trains_and_a_run_resumes_at_its_row(tmp_path, monkeypatch):
  monkeypatch.setattr(
    opening, "open_data", lambda cfg, seed: (Counting(seq_len=cfg.seq_len), Counting())
  )
  cfg = tiny_config({
    "num_steps": 4, "model.vocab_size": 260, "data.seq_len": 16, "data.batch_size": 8,
    "optimizer.schedule": "constant", "log.writers": ("jsonl",), "log.progress": False,
    "sample.max_tokens": 0,
  })  # fmt: skip
  train(dataclasses.replace(cfg, num_steps=2), tmp_path)
  train(cfg, tmp_path)
  with opening.open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run:
    assert run.position()["position"] == {"row": 32, "data": "counting 10"}


def test_nobody_asks_which_kind_rows_are():
  offenders = []
  for path in sorted(Path(ats_jax.__file__).parent.rglob("*.py")):
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if any(kind in text for kind in KINDS) else ():
      if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
        names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
      elif isinstance(node, ast.MatchClass):
        names = {ast.unparse(node.cls)}
      else:
        continue
      offenders += [f"{path}:{node.lineno} asks for {name}" for name in sorted(names & KINDS)]
  assert not offenders
