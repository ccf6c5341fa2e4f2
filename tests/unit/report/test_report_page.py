"""The page: structure, escaping, no access to anything outside; the card; the server."""

import hashlib
import json
import re
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser

import pytest
from run_folders import SPOILED, end, facts, rolled_back, training, write_run

from ats_jax.report.card import card
from ats_jax.report.page import VENDOR, html_page
from ats_jax.report.read import read_run
from ats_jax.report.report import make_report
from ats_jax.report.serve import PageServer

# Of npm's uplot 1.6.32.
VENDORED = {
  "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
  "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
  "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
VOID = {"meta", "rect", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
  """The elements of a page, and whether each is closed."""

  def __init__(self, text: str):
    super().__init__()
    self.elements: list[tuple[str, dict[str, str | None]]] = []
    self.texts: list[tuple[str, str]] = []
    self._open: list[str] = []
    self.feed(text)
    self.close()
    assert not self._open, self._open

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in VOID:
      self._open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    self.texts.append((self._open[-1] if self._open else "", data))

  def of(self, tag):
    return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture
def report(tmp_path):
  """Of a run that has everything, and text that is markup wherever text can be."""
  rows = [*training(range(10, 110, 10)), {"step": 100, "eval/loss": 4.0}]
  rows += [{"step": 100, f"train/{SPOILED}/loss": 3.0}, {"step": 100, "sample": SPOILED}, end(100)]
  rows += [{"step": 100, "eval/bigram_loss": 4.5, "eval/unigram_loss": 6.0}]
  log = ("2026-11-28 09:00:00 INFO    Text: " + SPOILED,)
  folder = write_run(tmp_path / "a<script>b", rows, {"sample.prompt": SPOILED}, log=log)
  rolled_back(folder / "decisions.jsonl")
  part = facts(name=f"training {SPOILED}", first=[SPOILED], left_out={SPOILED: 3})
  (folder / "data.json").write_text(json.dumps({"parts": [part]}))
  row = {"step": 1, "moe/load": [[0.5, 0.5]]}
  (folder / "layers.jsonl").write_text(json.dumps(row) + "\n")
  (folder / "samples").mkdir()
  answer = dict.fromkeys(("text", "answer", "before", "after"), SPOILED)
  (folder / "samples" / "answers.json").write_text(json.dumps([answer]))
  return make_report([read_run(str(folder))])


def test_text_stays_text(report):
  page = Page(html_page(report))
  scripts = page.of("script")
  assert scripts == [{"type": "application/json", "id": "data"}, {}, {}]
  shown = "".join(text for tag, text in page.texts if tag != "script")
  assert shown.count("<script>alert(1)</script>") >= 5 and "\u202e" not in shown
  (data,) = (t for tag, t in page.texts if tag == "script" and t.startswith('{"version"'))
  assert "<" not in data and json.loads(data) == json.loads(json.dumps(report.to_json()))


def test_it_needs_and_runs_nothing_else(report):
  text = html_page(report)
  page = Page(text)
  (policy,) = (m["content"] for m in page.of("meta") if "http-equiv" in m)
  assert "default-src 'none'" in policy and policy.count("'sha256-") == 2
  assert "unsafe-inline" not in policy.partition("script-src")[2]
  assert not re.findall(
    r"""(?:src|href)=|url\(|@import""", re.sub(r"<script.*?</script>", "", text, flags=re.S)
  )


def test_each_plot_has_a_label_a_table_and_the_focus(report):
  page = Page(html_page(report))
  plots = [div for div in page.of("div") if "data-figure" in div]
  assert len(plots) > 5
  for plot in plots:
    assert plot["role"] == "img" and plot["tabindex"] == "0" and len(plot["aria-label"] or "") > 30
  assert len(page.of("figure")) == len(plots)
  summaries = [text for tag, text in page.texts if tag == "summary" and text.startswith("Table: ")]
  assert len(summaries) == len(plots)
  assert page.of("html")[0]["lang"] == "en" and page.of("main") and page.of("h1")


def test_many_rows_make_a_small_page(tmp_path):
  folder = write_run(tmp_path / "a", training(range(1, 20_001)), num_steps=20_000)
  run = read_run(str(folder))
  page = html_page(make_report([run]))
  assert len(page) < 400_000  # the points of each line do not grow with the rows


def test_what_is_vendored_is_what_was_published():
  found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in VENDOR.iterdir()}
  assert found == VENDORED
  assert "MIT" in (VENDOR / "uPlot.LICENSE").read_text()


def test_a_card_is_markdown_without_markup_of_the_run(report):
  text = card(report)
  assert "- It finished at step 100 of 100." in text
  assert "<script>" not in text and r"\<script\>" in text
  rows = [line for line in text.splitlines() if line.startswith("| sample.prompt")]
  assert not rows or len(re.findall(r"(?<!\\)\|", rows[0])) == 4


def test_a_page_is_served_anew_to_this_machine_alone(report):
  made = []

  def make(refresh):
    made.append(refresh)
    if len(made) > 1:
      raise ValueError("a line is damaged")
    return html_page(report, refresh)

  with PageServer(make, 0) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    with urllib.request.urlopen(f"http://localhost:{port}/") as answer:
      text = answer.read().decode()
    assert '<meta http-equiv="refresh" content="15">' in text
    foreign = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": "evil.example"})
    for request, code in ((foreign, 404), (f"http://127.0.0.1:{port}/", 500)):
      with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
      assert error.value.code == code
      said = error.value.read().decode()
    assert said == "a line is damaged"
    server.shutdown()
