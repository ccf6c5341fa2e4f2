"""A training on exactly one file, which is all that many people have."""

import pytest
from commands import called, train_flags

SMALL = (
  "num_steps=4", "data.seq_len=32", "data.batch_size=4", "data.bpe_vocab_size=300",
  "model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.num_kv_heads=2",
  "model.d_ff=32", "checkpoint.every_steps=4", "eval.every_steps=4", "sample.max_tokens=4",
  "log.progress=False",
)  # fmt: skip
SENTENCE = "The café by the harbour opens at seven, and its first guests come in from the boats.\n"


@pytest.mark.parametrize(("repeats", "validated"), [(60, True), (10, False)])
def test_one_file(tmp_path, repeats, validated):
  book = tmp_path / "book.txt"
  book.write_text(SENTENCE * repeats, encoding="utf-8")
  settings = (*SMALL, f"data.paths={book}", f"data.cache_dir={tmp_path}/cache")
  result = called("train", *train_flags(tmp_path / "run", *settings))
  assert result.code == 0, result.err
  if validated:
    assert result.err.count("Held out for validation") == 1
    assert "bigram model of the same tokens" in result.err
  else:
    assert result.err.count("Too little text to hold any of it out for validation") == 1
    assert "eval/loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
