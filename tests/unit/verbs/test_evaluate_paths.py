"""`evaluate`: files, or sets of them by name, and what tasks need."""

import json
import sys
from pathlib import Path

import pytest

from ats_jax.checkpoint import workdir
from ats_jax.verbs.evaluate import parse_paths, tasks_of_run


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("", ()),
    ("a.txt,b/*.jsonl", ("a.txt", "b/*.jsonl")),
    ("web=a.txt", {"web": ("a.txt",)}),
    ("web=a.txt,code=src,web=b.txt", {"web": ("a.txt", "b.txt"), "code": ("src",)}),
    ("day=1.txt", ("day=1.txt",)),  # a file of that name
    ("gs://bucket/day=1/*.txt", ("gs://bucket/day=1/*.txt",)),
  ],
)
def test_paths_and_sets(text, found, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "day=1.txt").touch()
  assert parse_paths(text) == found


@pytest.mark.parametrize("text", ["a.txt,web=b.txt", "web=b.txt,a.txt"])
def test_some_without_a_name(text):
  with pytest.raises(ValueError, match=r"'a\.txt' (has no name|is not name=value)"):
    parse_paths(text)


@pytest.mark.parametrize(
  ("metadata", "says"),
  [
    (json.dumps({"folder": "/home/a"}), "'/home/a'"),
    (json.dumps({}), "an unknown folder"),
    ("[]", "an unknown folder"),
    ("{", "an unknown folder"),
    (None, "an unknown folder"),
  ],
)
def test_where_a_run_was_started(metadata, says, tmp_path):
  if metadata is not None:
    Path(tmp_path / workdir.METADATA).write_text(metadata)
  assert workdir.started_in(tmp_path) == says


def test_tasks_need_an_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
  with pytest.raises(ValueError, match=r"pip install 'ats_jax\[lm_eval\]'"):
    tasks_of_run("runs/debug", ["arc_easy"])
