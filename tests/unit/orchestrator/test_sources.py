"""A source whose training loss rises: what is said of it, and what is compared."""

import dataclasses
import math

import canonical
import jax
import numpy as np
import pytest
from fed import BATCH, Run
from helpers import counting_rows
from readings import ACT, Looks

from ats_jax.config.schema.setting import Table
from ats_jax.data.batch import SOURCE
from ats_jax.data.rows.origin import Origin
from ats_jax.orchestrator.constants import SETTLING_LOOKS, USUAL_LOOKS
from ats_jax.orchestrator.policy import triggers
from ats_jax.orchestrator.signals.interval import RowsRead, SourceLoss, Steps, source_losses
from ats_jax.orchestrator.signals.sources import where
from ats_jax.step.by_source import BySource
from ats_jax.step.program import make_program

HELD = {"": 2.0, "code": 2.0, "web": 2.0}
NO_HELD = {"": 2.0}


def seen(code=2.0, web=3.0, *, held=HELD, share=0.5, error=0.01):
  sources = {"code": SourceLoss(code, error, share), "web": SourceLoss(web, error, 1.0 - share)}
  return dict(held=held, sources=sources)


def looks(times=2 * USUAL_LOOKS, **given):
  """After some usual looks."""
  found = Looks(ACT)
  found(times, **seen(**given))
  return found


@pytest.mark.parametrize(("worse", "says"), [(False, "its text changed, as"), (True, "the model")])
def test_its_held_out_text_tells_the_text_from_the_model(worse, says):
  found = looks()
  held = HELD | {"code": 2.5} if worse else HELD
  judgement = found(**seen(code=2.6, held=held))
  (rise,) = judgement.rises
  assert (rise.source, rise.loss, rise.usual, rise.is_worse) == ("code", 2.6, 2.0, worse)
  assert "source code: training loss 2.6, before 2" in rise.says and says in rise.says
  # The held-out text alone decides about comparisons.
  assert (judgement.proposal is not None) == worse and not found.actions
  assert judgement.proposal is None or judgement.proposal.trigger != triggers.SOURCE


def test_without_held_out_text_going_on_is_compared_with_going_back():
  found = looks(held=NO_HELD)
  judgement = found(**seen(code=2.6, held=NO_HELD))
  assert judgement.proposal.trigger == triggers.SOURCE and not found.actions
  assert "its text changed, or the model got worse" in judgement.finding.reason
  assert all(arm.remembers and arm.sigmas == 0.0 for arm in judgement.proposal.arms)
  assert found(2, **seen(code=2.6, held=NO_HELD)).proposal is None  # one at a time


def test_what_stays_becomes_usual():
  found = looks()
  rose = [bool(found(**seen(code=2.6)).rises) for _ in range(2 * SETTLING_LOOKS)]
  assert rose == [True] * (SETTLING_LOOKS + 1) + [False] * (SETTLING_LOOKS - 1)
  found(USUAL_LOOKS, **seen(code=2.6))
  assert found(**seen(code=3.2)).rises[0].usual == 2.6


@pytest.mark.parametrize(
  "changes",
  [
    dict(code=2.04),  # too little to matter
    dict(code=2.5, error=0.1),  # its rows differ that much
    dict(code=2.5, share=0.2),  # another phase of the mixture: it is forgotten to some extent
  ],
)
def test_what_may_be_noise_or_the_curriculum_is_not_said(changes):
  found = looks()
  assert not found(**seen(**changes)).rises
  assert not found(**seen(**changes)).rises


def test_a_declared_rise_of_the_rate_is_not_said():
  found = looks()
  assert not any(found(**seen(code=2.6), applied=2e-3).rises for _ in range(SETTLING_LOOKS))


def test_noise_is_rarely_taken_for_a_rise():
  """A source of few rows, whose losses have a long tail, on its way down."""
  rng, found, rose = np.random.default_rng(0), Looks(ACT), 0
  for look in range(1000):
    rows = 2.0 + 3.0 / (1.0 + look / 20) + 0.3 * rng.standard_t(4, size=10)
    error = float(np.std(rows, ddof=1) / math.sqrt(10))
    judgement = found(**seen(code=float(np.mean(rows)), error=error, held=NO_HELD))
    rose += len(judgement.rises)
  assert rose <= 5


def test_an_interval_is_summed_up_by_tokens():
  column = {
    "train/loss": np.array([2.0, 2.0, 2.0]),
    "train/tokens": np.array([100.0, 100.0, 100.0]),
    "train/code/loss": np.array([1.0, np.nan, 3.0]),
    "train/code/tokens": np.array([30.0, 0.0, 10.0]),
    "train/web/loss": np.array([np.nan, np.nan, 3.0]),
    "train/web/tokens": np.array([0.0, 0.0, 10.0]),
  }
  assert source_losses(column) == {"code": SourceLoss(1.5, 1.0, 40 / 300)}


def test_rows_and_files_of_the_worst_step_are_named():
  names, losses = ["train/loss", "train/code/loss"], [1.0, 4.0, np.nan]
  steps = Steps(names, 30, np.array([[2.0, loss] for loss in losses]))

  def origin(row):  # every other row is of the source
    return Origin(("web", "code")[row % 2 :][:1], row // 2, (f"{'ab'[row % 4 // 2]}.txt:{row}",))

  says = where("code", steps, RowsRead(30, 1000), 8, origin)
  # The last step read rows 992 to 999.
  assert says == (
    "4 at the worst in step 29, rows 492 to 495 of the source (a.txt:985, b.txt:987, a.txt:989 "
    "and 1 more)"
  )
  elsewhere = lambda row: Origin(("web",), row, ())
  assert where("code", steps, RowsRead(30, 1000), 8, elsewhere) == says.split(",")[0]


@pytest.mark.thorough
def test_a_run_says_which_rows_of_which_files(tmp_path):
  cfg, written = canonical.config("dense", canonical.SUPERVISED), []
  cfg = dataclasses.replace(
    cfg,
    data=dataclasses.replace(cfg.data, sources=Table(web=("web",), code=("code",))),
    orchestrator=dataclasses.replace(cfg.orchestrator, mode="observe"),
  )
  source = np.repeat([[0], [1]], BATCH // 2, axis=0) * np.ones((1, cfg.data.seq_len), np.int32)

  def rows(step, noise=False):
    is_noise = noise & (source == 1)
    usual, other = counting_rows(step), counting_rows(step, noise=True)
    return {n: np.where(is_noise, other[n], usual[n]) for n in usual} | {SOURCE: source}

  with jax.set_mesh(canonical.mesh()):
    program, path = make_program(cfg, BySource(cfg)), tmp_path / "decisions.jsonl"
    run = Run(program, path, cfg=cfg, write=lambda step, metrics: written.append(metrics))
    run(96, rows)(16, lambda step: rows(step, noise=True))
    assert not run.end()
  causes = [cause for line in run.lines("check") for cause in line["health"]["causes"]]
  (first, *_) = [cause for cause in causes if cause.startswith("source ")]
  assert first.startswith("source code: training loss") and "in step " in first
  assert "rows 7" in first or "rows 8" in first  # step 97 begins at row 768
  assert "of the source (code.txt:" in first and "web.txt" not in first
  assert max(metrics["orchestrator/risen_sources"] for metrics in written) == 1
