import concurrent.futures
import json
import os
import random
import shutil
import threading

import pytest
from checkpoint_helpers import flip_bit

from ats_jax.checkpoint import integrity, load_extra
from ats_jax.checkpoint.integrity import CheckpointError


@pytest.fixture
def sealed(tmp_path):
  folder = tmp_path / "7"
  (folder / "state" / "d").mkdir(parents=True)
  (folder / "extra.json").write_text("{}")
  (folder / "state" / "d" / "data").write_bytes(random.Random(0).randbytes(1000))
  (folder / "state" / "empty").touch()
  integrity.seal(folder, {"step": 7, "run": None, "metric": 1.5, "leaves": {"ü": "float32[]"}})
  return folder


def hashed(sealed):
  """Wait for what `checking` has begun."""
  concurrent.futures.wait(integrity._begun[os.fspath(sealed)][1])


def test_what_was_begun_is_used_once(sealed):
  data = sealed / "state" / "d" / "data"
  with integrity.checking(sealed):
    hashed(sealed)
    flip_bit(data, 4321)
    assert integrity.find_damage(sealed) == []
    (problem,) = integrity.find_damage(sealed)
  with integrity.checking(sealed):
    hashed(sealed)
    flip_bit(data, 4321)
    assert integrity.find_damage(sealed) == [problem]
  with integrity.checking(sealed):
    hashed(sealed)
    flip_bit(data, 4321)
  assert integrity.find_damage(sealed) == [problem]


def test_what_was_begun_is_not_used_of_another_manifest(sealed):
  with integrity.checking(sealed):
    hashed(sealed)
    (sealed / "state" / "empty").write_bytes(b"x")
    (sealed / "manifest.json").unlink()
    integrity.seal(sealed, {"step": 7, "run": None, "metric": 1.5, "leaves": {}})
    flip_bit(sealed / "state" / "d" / "data", 4321)
    assert integrity.find_damage(sealed)


def test_an_interrupt_ends_what_was_begun(sealed):
  before = threading.active_count()
  with pytest.raises(KeyboardInterrupt), integrity.checking(sealed):
    raise KeyboardInterrupt
  assert threading.active_count() == before and not integrity._begun


def test_files_are_hashed_to_their_end(sealed, monkeypatch):
  monkeypatch.setattr(integrity, "PIECE", 7)
  assert integrity.find_damage(sealed) == []


def test_sealed_folder_is_intact(sealed):
  assert integrity.find_damage(sealed) == []
  manifest = integrity.read_manifest(sealed)
  assert (manifest["step"], manifest["metric"]) == (7, 1.5)
  assert set(manifest["files"]) == {"extra.json", "state/d/data", "state/empty"}


def test_unknown_file_is_harmless(sealed):
  (sealed / "notes.txt").write_text("mine")
  assert integrity.find_damage(sealed) == []


def test_truncated_missing_and_changed_files_are_named(sealed):
  data = sealed / "state" / "d" / "data"
  flip_bit(data, 4321)
  (problem,) = integrity.find_damage(sealed)
  assert problem.startswith("state/d/data has changed: sha256 ")
  data.write_bytes(data.read_bytes()[:-1])
  assert integrity.find_damage(sealed) == ["state/d/data has 999 bytes instead of 1000"]
  data.unlink()
  (sealed / "state" / "empty").write_bytes(b"x")
  assert integrity.find_damage(sealed) == [
    "state/d/data is missing",
    "state/empty has 1 bytes instead of 0",
  ]
  assert integrity.find_damage(sealed, only=["extra.json"]) == []


def test_every_byte_of_the_manifest_counts(sealed):
  path = sealed / "manifest.json"
  original = path.read_bytes()
  for byte in range(len(original)):
    flip_bit(path, 8 * byte + byte % 8)
    with pytest.raises(CheckpointError, match=r"manifest.json (cannot be read|has changed)"):
      integrity.read_manifest(sealed)
    path.write_bytes(original)
  assert integrity.find_damage(sealed) == []


def test_a_manifest_of_somebody_else_leads_nowhere(sealed):
  """Its checksum can be made by anybody: what it says is checked too."""
  entry = {"bytes": 1, "sha256": "0" * 64}
  os.mkfifo(sealed / "pipe")
  for fields, words in (
    ([], "holds no object"),
    ({"step": None}, "has no step"),
    ({"run": "me"}, "has no run"),
    ({"metric": "1"}, "has no metric"),
    ({"leaves": []}, "has no leaves"),
    ({"leaves": {"a": 1}}, "has leaves that are no texts"),
    ({"files": ["a"]}, "has no files"),
    ({"files": {"../../etc/passwd": entry}}, "names '../../etc/passwd', which is outside"),
    ({"files": {"/etc/passwd": entry}}, "is outside"),
    ({"files": {"extra.json": {"bytes": "1"}}}, "has no size and sha256 of extra.json"),
    ({"files": {"pipe": entry}}, "pipe is not a regular file"),
  ):
    good = {"version": integrity.VERSION, "step": 7, "run": None, "metric": None, "leaves": {}}
    good["files"] = {}
    body = good | fields if isinstance(fields, dict) else fields
    (sealed / "manifest.json").write_text(integrity._render(body))
    (problem,) = integrity.find_damage(sealed)
    assert words in problem
  (sealed / "manifest.json").write_text("[" * 100_000)
  assert "nested too deeply" in integrity.find_damage(sealed)[0]


@pytest.mark.parametrize("text", ["[]", "null", '"a"'])
def test_an_extra_of_somebody_else_is_damage(sealed, text):
  (sealed / "extra.json").write_text(text)
  integrity.seal(sealed, {"step": 7, "run": None, "metric": None, "leaves": {}})
  with pytest.raises(CheckpointError, match=r"checkpoint .*/7 is damaged: extra.json holds no obj"):
    load_extra(sealed.parent)


def test_missing_manifest_is_damage(sealed):
  (sealed / "manifest.json").unlink()
  assert integrity.find_damage(sealed) == ["manifest.json is missing"]


def test_folder_in_place_of_a_file_is_damage(sealed):
  (sealed / "extra.json").unlink()
  shutil.copytree(sealed / "state", sealed / "extra.json")
  (problem,) = integrity.find_damage(sealed)
  assert problem.startswith("extra.json ")


@pytest.mark.parametrize("version", [integrity.VERSION - 1, integrity.VERSION + 1])
def test_another_format_is_an_error_and_not_damage(sealed, monkeypatch, version):
  monkeypatch.setattr(integrity, "VERSION", version)
  integrity.seal(sealed, {"step": 7, "metric": None, "leaves": {}})
  monkeypatch.undo()
  assert json.loads((sealed / "manifest.json").read_text())["body"]["version"] == version
  said = f"format version {version}, this program reads {integrity.VERSION}"
  with pytest.raises(CheckpointError, match=said):
    integrity.find_damage(sealed)
