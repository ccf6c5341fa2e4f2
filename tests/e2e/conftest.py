"""One small trained run, and the text and settings that it was made of."""

import random
from pathlib import Path

import pytest
from commands import called, train_flags

STEPS = 40
WORDS = ("def", "return", "self", "import", "for", "in", "the", "if", "not", "value", "x", "y")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
  """A folder of 40 documents."""
  folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
  for i in range(40):
    (folder / f"{i}.txt").write_text(" ".join(draw.choices(WORDS, k=60 + 5 * i)))
  return folder


@pytest.fixture(scope="session")
def tiny(text) -> tuple[str, ...]:
  """Settings of a run that takes a moment."""
  return (
    "num_steps=4",
    "model.num_layers=1",
    "model.d_model=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.d_ff=32",
    f"data.paths={text}",
    "data.validation_fraction=0.2",
    "data.tokenizer=bytes",
    "data.seq_len=32",
    "data.batch_size=8",
    "optimizer.warmup_steps=2",
    "eval.bigram_baseline=False",
    "log.every_steps=1",
    "sample.max_tokens=0",
  )


@pytest.fixture(scope="session")
def trained_settings(tiny) -> tuple[str, ...]:
  """Settings of `trained`."""
  return (
    *tiny,
    f"num_steps={STEPS}",
    "data.tokenizer=bpe",
    "data.bpe_vocab_size=300",
    "optimizer.learning_rate=6.0",  # so high that the best checkpoint is an earlier one
    f"optimizer.warmup_steps={STEPS}",
    "optimizer.ema_decay=0.5",
    "eval.every_steps=5",
    "checkpoint.every_steps=5",
    "checkpoint.keep_best=True",
    "log.profile_step=30",
    "sample.prompt=def",
    "sample.max_tokens=16",
  )


@pytest.fixture(scope="session")
def trained(trained_settings, tmp_path_factory) -> Path:
  """The workdir of a complete run. Not to be changed: copy it."""
  workdir = tmp_path_factory.mktemp("trained")
  result = called("train", *train_flags(workdir, *trained_settings))
  assert result.code == 0, result.err
  return workdir
