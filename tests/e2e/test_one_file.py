"""The example of the README with exactly one file, which is all that many people have."""

import re
import shlex

import pytest
from commands import REPOSITORY, forked

SMALL = (
  "num_steps=4", "data.seq_len=32", "data.batch_size=4", "data.bpe_vocab_size=300",
  "model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.num_kv_heads=2",
  "model.d_ff=32", "checkpoint.every_steps=4", "eval.every_steps=4", "sample.max_tokens=4",
  "log.progress=False",
)  # fmt: skip
SENTENCE = "The café by the harbour opens at seven, and its first guests come in from the boats.\n"


def example() -> list[str]:
  """The words of the README's training on a reader's own text."""
  readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
  (line,) = re.findall(r"^ats-jax train .*--workdir=runs/mine .*$", readme, re.MULTILINE)
  return shlex.split(line)[2:]


@pytest.mark.parametrize(("repeats", "validated"), [(60, True), (10, False)])
def test_one_file(tmp_path, repeats, validated):
  book = tmp_path / "book.txt"
  book.write_text(SENTENCE * repeats, encoding="utf-8")
  words = [f"--config.{setting}" for setting in (*SMALL, f"data.cache_dir={tmp_path}/cache")]
  for word in example():
    name, _, _ = word.partition("=")
    changed = {"--workdir": tmp_path / "run", "--config.data.paths": book}
    words.append(f"{name}={changed[name]}" if name in changed else word)
  result = forked("ats_jax.train", *words)
  assert result.code == 0, result.err
  if validated:
    assert result.err.count("Held out for validation") == 1
    assert "bigram model of the same tokens" in result.err
  else:
    assert result.err.count("Too little text to hold any of it out for validation") == 1
    assert "eval/loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
