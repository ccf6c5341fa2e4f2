"""`.ci/commit_subject.py`: which subjects of commits are accepted."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "commit_subject.py"
spec = importlib.util.spec_from_file_location("commit_subject", SCRIPT)
assert spec is not None and spec.loader is not None
commit_subject = importlib.util.module_from_spec(spec)
spec.loader.exec_module(commit_subject)


@pytest.mark.parametrize(
  ("subject", "said"),
  [
    ("bridge: read models whose config has fields of experts", ""),
    ("ops/attention: need no mask for one document", ""),
    ("Merge branch 'data'", ""),
    ("x: " + "a b" * 30, "characters"),
    ("Fix the loader", "expected one area"),
    ("model, ops: use one name", "expected one area"),
    ("data: Read files", "expected one area"),
    ("data: fixed the loader", "imperative"),
    ("data: reading files", "imperative"),
    ("data: read files.", "period"),
  ],
)
def test_subjects(subject, said):
  wrong = commit_subject.fault(subject)
  assert said in wrong and bool(wrong) == bool(said)


def test_the_message_in_a_file(tmp_path, capsys):
  message = tmp_path / "message"
  message.write_text("# a comment of git\n\ndata: read files of C4\n\nMore.\n")
  assert commit_subject.main([str(message)]) == 0
  message.write_text("read files of C4\n")
  assert commit_subject.main([str(message)]) == 1
  assert "expected one area" in capsys.readouterr().err
