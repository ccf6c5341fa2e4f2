"""What a run says of the rows of the vocabulary's table that its text does not use."""

import dataclasses
import logging

import pytest
from helpers import tiny_config

from ats_jax.config.presets import PRESETS, preset
from ats_jax.data.splits import open_datasets
from ats_jax.train.report import say_unused_rows


@pytest.fixture
def said(tmp_path, caplog):
  """said(settings) -> the level and the text of the one line."""

  def of(text, parameters=10**6, **settings):
    (tmp_path / "a.txt").write_text(text)
    cfg = tiny_config({
      "data.paths": (str(tmp_path / "a.txt"),), "data.cache_dir": f"{tmp_path}/cache",
      "data.tokenizer": "bytes", "data.seq_len": 16,
      **{name.replace("__", "."): value for name, value in settings.items()},
    })  # fmt: skip
    train, _ = open_datasets(cfg.data, cfg.seed)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="absl"):
      say_unused_rows(cfg, train, parameters)
    (record,) = caplog.records
    return record.levelname, record.getMessage()

  return of


LETTERS = "".join(map(chr, range(128)))  # 128 ids, with bos and eos 130


def test_a_table_larger_than_the_tokenizer(said):
  level, text = said(LETTERS * 9, model__vocab_size=1024, model__tie_embeddings=True)
  assert level == "WARNING"
  assert "uses 130 of 1,024 rows of the embedding; the other 894 are 87.3% of the table" in text
  assert "2.9% of all parameters" in text  # 894 x 32 of a million
  assert "data.tokenizer has only 259 ids: --config.model.vocab_size=0" in text
  assert "--config.data.bpe_vocab_size=1024" in text


def test_a_tokenizer_larger_than_the_text_needs(said):
  level, text = said(LETTERS * 9, model__vocab_size=260, model__tie_embeddings=False)
  assert level == "WARNING" and "rows of the embedding and of the head" in text
  assert "--config.data.tokenizer=bpe --config.data.bpe_vocab_size=300" in text


def test_a_quarter_is_no_warning(said):
  level, text = said(LETTERS * 9, model__vocab_size=173)
  assert level == "INFO" and "the other 43 are 24.9% of the table" in text
  assert "For a new run" not in text


def test_presets_train_a_vocabulary_that_fills_their_table():
  for name, row in PRESETS.items():
    config = preset(name)
    assert config.data.tokenizer == "bpe"
    assert config.data.bpe_vocab_size == config.model.vocab_size == row.vocab_size


def test_a_preset_of_a_small_text_says_what_would_fit(tmp_path, caplog):
  (tmp_path / "a.txt").write_text(LETTERS * 200)
  cfg = tiny_config(
    {"data.paths": (str(tmp_path / "a.txt"),), "data.cache_dir": f"{tmp_path}/cache"}
  )
  data = dataclasses.replace(cfg.data, tokenizer="bpe", bpe_vocab_size=50_304, seq_len=16)
  with caplog.at_level(logging.WARNING, logger="absl"):
    open_datasets(data, 0)
  assert "little for a vocabulary of 50304" in caplog.text
  assert "--config.data.bpe_vocab_size=512 --config.model.vocab_size=0" in caplog.text
