"""`evaluate --paths`: files, or sets of them by name."""

import pytest

from ats_jax.verbs.evaluate import parse_paths


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
