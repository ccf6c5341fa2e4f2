"""Every broken input is named or accepted, none ends the process, and the counts add up."""

import importlib.util
import signal

import broken_inputs
import pytest

from ats_jax.data.checks import check
from ats_jax.data.report import Report
from ats_jax.data.source import find_files
from ats_jax.data.splits import open_split
from ats_jax.data.tokenizer import ByteTokenizer


class Named(Report):
  """A report that keeps all it is told."""

  def __init__(self):
    super().__init__(strict=False, file=self)
    self.lines: list[str] = []

  def write(self, line: str) -> None:
    self.lines.append(line)


@pytest.fixture(autouse=True)
def no_hang():
  signal.alarm(280)
  yield
  signal.alarm(0)


def tried(folder, config, seed):
  """Check one case; the report, and whether a training would read the file."""
  case = broken_inputs.make(folder, seed)
  found, report = Named(), Named()
  try:
    files = find_files(str(case.path), found)
  except ValueError as e:  # nothing but what is no file
    assert str(case.path) in str(e), seed
    return None
  check(files, config(), ByteTokenizer(), report)
  balance = report.balance()
  assert balance["records"] == balance["documents"] + balance["dropped"], seed
  assert case.records in (None, balance["records"]), (seed, case, balance, report.lines)
  # One line for each thing that was dropped, which says where.
  assert len(report.lines) == balance["dropped"], (seed, report.lines)
  assert all(line.startswith(str(case.path)) for line in report.lines), (seed, report.lines)
  assert all("Traceback" not in line and line.count("\n") == 1 for line in report.lines), seed
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
  ds = open_split(config(seq_len=64), 0, str(folder), ByteTokenizer())
  assert ds.corpus.report["balance"] == expected
  assert ds.num_documents == expected["documents"]
  assert ds.rows(range(ds.num_rows))["loss_mask"].sum() == ds.num_tokens


def kinds():
  """With tables, where pyarrow is installed."""
  with_tables = importlib.util.find_spec("pyarrow") is not None
  return broken_inputs.KINDS + [broken_inputs.tables] * (2 * with_tables)


@pytest.mark.parametrize("start", [0, 100, 200])
def test_a_hundred_cases(tmp_path, config, start):
  try_all(tmp_path, config, range(start, start + 100))


@pytest.mark.slow
def test_two_thousand_cases(tmp_path, config, monkeypatch):
  monkeypatch.setattr(broken_inputs, "KINDS", kinds())
  try_all(tmp_path, config, range(1000, 3000))


@pytest.mark.formats
def test_tables(tmp_path, config, monkeypatch):
  monkeypatch.setattr(broken_inputs, "KINDS", [broken_inputs.tables])
  try_all(tmp_path, config, range(5000, 5200))
