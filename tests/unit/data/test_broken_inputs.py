"""Every broken input is named or accepted, none ends the process, and the counts add up."""

import io
import os

import broken_inputs
import numpy as np
import pytest

from ats_jax.config.schema.filters import Exact
from ats_jax.config.schema.mixture import Phase
from ats_jax.config.schema.reading import Streaming
from ats_jax.config.schema.setting import Table
from ats_jax.data.look.checks import check_files
from ats_jax.data.sources import open_data
from ats_jax.data.splits import open_split
from ats_jax.data.text.report import Report
from ats_jax.data.text.source import find_files
from ats_jax.data.tokens.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("no_hang")


def tried(folder, config, seed):
  """Check one case; the report, and whether a training would read the file."""
  case = broken_inputs.make(folder, seed)
  lines = io.StringIO()  # all that the report is told
  report = Report(strict=False, file=lines)
  files = find_files((str(case.path),), Report(strict=False))
  check_files(files, config(), ByteTokenizer(), report)
  balance = report.balance()
  assert balance["records"] == balance["documents"] + balance["dropped"], seed
  assert case.records in (None, balance["records"]), (seed, case, balance, lines.getvalue())
  # One line for each thing that was dropped, which says where.
  said = lines.getvalue().splitlines()
  assert len(said) == balance["dropped"], (seed, said)
  assert all(line.startswith(str(case.path)) and "Traceback" not in line for line in said), seed
  return None if "unusable token file" in report.malformed else report


def try_all(tmp_path, config, seeds):
  """All cases alone, then all that a training would read in one corpus."""
  folder = tmp_path / "d"
  folder.mkdir()
  expected: dict[str, int] = {"records": 0, "documents": 0, "dropped": 0}
  used = 0
  for seed in seeds:
    report = tried(folder, config, seed)
    if report:
      used += 1
      expected = {name: n + expected[name] for name, n in report.balance().items()}
    else:
      next(folder.glob(f"{seed:05}.*")).unlink(missing_ok=True)
  assert expected["documents"] > used / 10 and expected["dropped"] > used / 3  # a fair mixture
  ds = open_split(config(seq_len=64), 0, (str(folder),), ByteTokenizer())
  assert ds.packed.corpus.report["balance"] == expected
  assert ds.info.num_documents == expected["documents"]
  assert ds.read_once(range(ds.info.num_rows))["loss_mask"].sum() == ds.info.num_tokens
  return expected


def try_filtered_sources(tmp_path, config, expected):
  """The same files as two sources of a mixture, with copies dropped; and as a stream."""
  files = sorted((tmp_path / "d").iterdir())
  assert len(files) > 20
  for number, file in enumerate(files):
    (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
    os.rename(file, tmp_path / "ab"[number % 2] / file.name)
  paths = {name: tmp_path / name for name in "ab"}
  for name in ("one", "two"):
    (tmp_path / "a" / f"{name}.txt").write_text("The same words.")
  usual = dict(seq_len=64, phases=(Phase(Table(a=2, b=1), steps=3), Phase(Table(b=1))))
  sources = Table({name: (str(path),) for name, path in paths.items()})
  cfg = config(sources=sources, filters=(Exact(),), **usual)
  ds, _ = open_data(cfg, 0)
  reports = [part.packed.corpus.report for part in ds.info.parts.values()]
  sums = {name: sum(r["balance"][name] for r in reports) for name in expected}
  copies = sum(sum(r["filtered"].values()) for r in reports)
  assert copies > 0 and sums == {
    "records": expected["records"] + 2,
    "documents": expected["documents"] + 2 - copies,
    "dropped": expected["dropped"] + copies,
  }
  ds.read(np.arange(200))

  both = tuple(map(str, paths.values()))
  for file in find_files(both, Report(strict=False)):
    if file.kind == "tokens":  # which a stream does not read
      os.unlink(file.path)
  whole = open_split(config(seq_len=64), 0, both, ByteTokenizer())
  stream, _ = open_data(config(paths=both, seq_len=64, reading=Streaming(window_mb=0.3)), 0)
  targets, row = 0, 0
  while stream.visit(row).epoch == 0:
    targets += int(stream.read(np.array([row]))["loss_mask"].sum())
    row += 1
  assert targets == whole.info.num_tokens


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_case(tmp_path, config, count):
  expected = try_all(tmp_path, config, range(count, 2 * count))
  try_filtered_sources(tmp_path, config, expected)


@pytest.mark.formats
def test_tables(tmp_path, config, monkeypatch):
  monkeypatch.setattr(broken_inputs, "KINDS", [broken_inputs.tables])
  try_all(tmp_path, config, range(5000, 5150))
