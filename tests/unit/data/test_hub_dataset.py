"""Which files of a dataset's folder are read: by its card, and by the names of its files."""

import logging
import re
import sys

import pytest

from ats_jax.data.text.hub_dataset import TRAIN, VALIDATION
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files, read_pieces

LINE = '{"text": "a"}\n'
CARD = "---\nlicense: mit\n{}---\n# A dataset\n"
CONFIGS = """configs:
- config_name: small
  data_files: few.jsonl
- config_name: default
  data_files:
  - split: train
    path: ["a/*.json", "./more.csv"]
  - split: test
    path: b
"""


def found(folder, split=TRAIN):
  report = Report(strict=False)
  return [file.name for file in find_files((str(folder),), report, split=split)], report


@pytest.fixture
def folder(write, tmp_path):
  def make(*names, card=None):
    for name in names:
      write(f"d/{name}", LINE)
    if card is not None:
      write("d/README.md", card)
    return tmp_path / "d"

  return make


@pytest.mark.parametrize(
  ("names", "train", "validation"),
  [
    ("train.json dev.json test.json", "train.json", "dev.json"),
    ("train-00000-of-00001.csv test.csv", "train-00000-of-00001.csv", "test.csv"),
    ("data/train/a.json.gz data/valid/a.json.gz", "data/train/a.json.gz", "data/valid/a.json.gz"),
    ("a.jsonl test.jsonl", "a.jsonl", "a.jsonl test.jsonl"),
    ("a.jsonl latest.jsonl contest.txt", "a.jsonl contest.txt latest.jsonl", None),
    ("a.py package.json test/test_a.py table.csv", "a.py test/test_a.py", None),
    ("train.jsonl package.json", "train.jsonl", None),
  ],
)
def test_splits_by_name(folder, names, train, validation):
  path = folder(*names.split())
  assert found(path)[0] == train.split()
  assert found(path, VALIDATION)[0] == (validation or train).split()


def test_what_is_left_out_is_said(folder, caplog):
  with caplog.at_level(logging.INFO):
    _, report = found(folder("train.jsonl", "validation.jsonl", "test.jsonl", "b.json"))
  assert report.skipped == {
    "of the split test": 1, "of the split validation": 1,
    "JSON or CSV in a folder of no dataset": 1,
  }  # fmt: skip
  assert "Read: train (1 files). Left out: test (1 files), validation (1 files)." in caplog.text
  assert "name the folder in data.validation_paths too" in caplog.text


def test_splits_by_the_card(folder, monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # the base install lacks it
  names = ("a/1.json", "b/1.json", "few.jsonl", "more.csv", "train.jsonl")
  path = folder(*names, card=CARD.format(CONFIGS))
  train, report = found(path)
  assert train == ["more.csv", "a/1.json"]
  assert report.skipped["not part of the dataset"] == 3
  assert found(path, VALIDATION)[0] == ["b/1.json"]


@pytest.mark.parametrize(
  ("card", "read"),
  [
    (CARD.format("dataset_info:\n  features: []\n"), ["a.json"]),
    (CARD.format("configs:\n- config_name: x\n  data_files: '**/*.json'\n"), ["a.json"]),
    (CARD.format(""), ["README.md"]),
    ("# A program\n---\nconfigs: []\n---\n", ["README.md"]),
    ("---\nconfigs: [\n---\n", ["README.md"]),
    ("---\n- configs\n---\n", ["README.md"]),
    (b"\xff", ["README.md"]),
  ],
)
def test_which_text_is_a_card(folder, card, read):
  assert found(folder("a.json", card=card))[0] == read


@pytest.mark.parametrize(
  ("names", "card", "message"),
  [
    ("c4.00.json.gz c4.01.json.gz", None, r"Name them by a glob: \S*d/\*\.json\.gz\.$"),
    ("sub/a.csv", None, r"Name them by a glob: \S*d/sub/\*\.csv\.$"),
    ("test.jsonl dev.jsonl", None, "nothing to train on but test and validation splits"),
    (
      "a.jsonl", "configs:\n- {config_name: x, data_files: a}\n- {config_name: y, data_files: b}\n",
      "the configurations x, y. Name the files of one of them",
    ),
  ],
)  # fmt: skip
def test_what_is_not_decided_for_the_user(folder, names, card, message):
  with pytest.raises(ValueError, match=message):
    found(folder(*names.split(), card=card and CARD.format(card)))


def test_json_and_csv_are_read_by_name_and_by_glob(folder):
  path = folder("a.json", "b.csv", "c.tsv", "d.json.gz")
  for name in ("a.json", "b.csv", "c.tsv", "d.json.gz"):
    assert found(path / name)[0] == [name]
  assert found(path / "*")[0] == ["a.json", "b.csv", "c.tsv", "d.json.gz"]


@pytest.mark.parametrize("own", ["config.json run_id", "prepared.json"])
def test_what_this_program_wrote_is_no_input(folder, own):
  written = (f"runs/a/{name}" for name in (*own.split(), "samples/3.txt", "metrics.jsonl"))
  path = folder("a.jsonl", "runs/b.txt", *written)
  for paths in (path, path / "**" / "*"):
    assert found(paths)[0] == ["a.jsonl", "runs/b.txt"]
    assert "workdir or data cache of this program" in found(paths)[1].skipped


LANGUAGES = """configs:
- config_name: en
  data_files:
  - {split: train, path: en/train.jsonl}
  - {split: test, path: en/test.jsonl}
- config_name: de
  data_files:
  - {split: training, path: de.jsonl}
"""


@pytest.fixture
def languages(write, tmp_path, monkeypatch):
  """The name of a dataset with two configurations, whose texts are the names of their files."""
  monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
  write("d/README.md", CARD.format(LANGUAGES))
  for name in ("en/train", "en/test", "de"):
    write(f"d/{name}.jsonl", f'{{"content": "{name}"}}\n')
  return f"datasets://{tmp_path / 'd'}"


@pytest.mark.formats
@pytest.mark.parametrize(
  ("options", "split", "text"),
  [
    ("config=en", TRAIN, "en/train"),
    ("config=en", VALIDATION, "en/test"),
    ("config=en&split=test", TRAIN, "en/test"),
    ("config=de", TRAIN, "de"),
  ],
)
def test_a_dataset_by_name_configuration_and_split(languages, options, split, text):
  report = Report(strict=False)
  (file,) = find_files((f"{languages}?{options}",), report, split=split)
  assert [piece.text for piece in read_pieces(file, "content", report)] == [text]


@pytest.mark.formats
@pytest.mark.parametrize(
  ("options", "words"),
  [
    ("", "Please pick one among the available configs: ['en', 'de']"),
    ("config=fr", "'fr' not found. Available: ['en', 'de']"),
    ("config=en&split=dev", "has no split 'dev'. It has: train, test"),
    ("config=en&split=train[:1]", "has no split 'train[:1]'"),
    ("name=en", "has the unknown part 'name'"),
  ],
)
def test_what_no_dataset_has(languages, options, words):
  with pytest.raises(ValueError, match=re.escape(words)) as found:
    find_files((f"{languages}?{options}",), Report(strict=False))
  assert "\n" not in str(found.value)


@pytest.mark.formats
def test_a_dataset_that_is_not_there(languages):
  with pytest.raises(ValueError, match="nowhere"):
    find_files((f"{languages}/nowhere",), Report(strict=False))
