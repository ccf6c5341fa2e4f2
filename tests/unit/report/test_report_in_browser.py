"""The page in a real browser: it draws, complains of nothing, fits a phone and runs no text."""

import json

import chromium
import pytest
from run_folders import SPOILED, end, facts, rolled_back, training, write_run

from ats_jax.report.page import html_page
from ats_jax.report.read import read_run
from ats_jax.report.report import make_report

pytestmark = pytest.mark.browser

# Plots are drawn as they come into sight: this shows one after the other, and waits for each.
DRAWN = """new Promise((done, fail) => {
  const boxes = [...document.querySelectorAll("[data-figure]")].slice(0, COUNT);
  const next = () => {
    const left = boxes.find((box) => !box.querySelector("canvas"));
    if (left) left.scrollIntoView();
    else done(boxes.length);
  };
  new MutationObserver(next).observe(document.body, { childList: true, subtree: true });
  setTimeout(() => fail(new Error("a plot is not drawn")), 60000);
  next();
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  """Of two runs of which one has everything, with markup wherever text can be."""
  folder = tmp_path_factory.mktemp("page")
  names = [f"train/{SPOILED}/loss"]
  folders = []
  for name, seed in (("a<script>b", 0.0), ("b", 0.1)):
    rows = [*training(range(10, 110, 10), seed=seed), {"step": 100, "eval/loss": 4.0}, end(100)]
    rows += [{"step": 100, names[0]: 3.0}, {"step": 100, "sample": SPOILED}]
    rows.append({"step": 100, "eval/bigram_loss": 4.5, "eval/unigram_loss": 6.0})
    changes = {"sample.prompt": SPOILED, "optimizer.weight_decay": 0.1 + seed}
    folders.append(write_run(folder / name, rows, changes))
    load = {"step": 1, "moe/load": [[0.5, 0.5]], "moe/layer_entropy": [0.6]}
    (folders[-1] / "layers.jsonl").write_text(json.dumps(load) + "\n")
    parts = [facts(name=SPOILED, first=[SPOILED], left_out={SPOILED: 3})]
    (folders[-1] / "data.json").write_text(json.dumps({"parts": parts}))
  rolled_back(folders[0] / "decisions.jsonl")
  for count in (1, 2):
    report = make_report([read_run(str(each)) for each in folders[:count]])
    (folder / f"{count}.html").write_text(html_page(report), encoding="utf-8")
  return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
  with chromium.opened(tmp_path_factory.mktemp("chromium")) as tab:
    yield tab


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("count", [1, 2])
def test_a_page_draws_and_complains_of_nothing(page, tab, count, width, dark):
  tab.open(page / f"{count}.html", width=width, dark=dark)
  tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
  assert tab.evaluate(DRAWN.replace("COUNT", "Infinity"))
  assert not tab.complaints
  assert tab.evaluate("document.documentElement.scrollWidth") <= width
  assert tab.evaluate("document.scripts.length") == 3
  background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
  assert (sum(map(int, background[4:-1].split(","))) < 3 * 128) == dark
  shown = tab.evaluate("document.body.innerText")
  assert SPOILED.split("\u202e")[0].strip() in shown


def test_the_keyboard_moves_through_a_plot(page, tab):
  tab.open(page / "1.html", width=1280, dark=False)
  assert tab.evaluate(DRAWN.replace("COUNT", "1"))
  tab.evaluate("document.querySelector('.lines').focus()")
  tab.send("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
  said = tab.evaluate("document.querySelector('.lines .u-legend').innerText")
  assert "10" in said and "4.9" in said
