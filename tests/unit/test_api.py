"""`ats_jax.api`: the page that documents it, and that calls leave the process as it was."""

import asyncio
import dataclasses
import doctest
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import threading

import jax
import pytest
from absl import flags
from commands import REPOSITORY
from helpers import CACHED
from program_cache import user_cache

import ats_jax
from ats_jax import api
from ats_jax.config import Config
from ats_jax.train.run import Run

PAGE = REPOSITORY / "docs" / "reference" / "api.md"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
  folder = tmp_path_factory.mktemp("text")
  for i in range(20):
    (folder / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog. " * 12)
  return str(folder)


@pytest.fixture
def cfg(text) -> Config:
  return api.config(
    "debug",
    {
      **CACHED,
      "num_steps": 3,
      "model.num_layers": 1,
      "model.d_model": 16,
      "model.num_heads": 2,
      "model.d_ff": 16,
      "data.paths": (text,),
      "data.tokenizer": "bytes",
      "data.seq_len": 32,
      "data.validation_fraction": 0.2,
      "optimizer.warmup_steps": 1,
      "eval.bigram_baseline": False,
      "log.writers": ("jsonl",),
      "log.every_steps": 1,
      "sample.max_tokens": 0,
    },
  )


def process_state() -> dict:
  """What a library should leave as it is."""
  root, absl = logging.getLogger(), logging.getLogger("absl")
  return {
    "jax": dict(jax.config.values),
    "mesh": (jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()),
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "signals": {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
    "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    "logs": [(log.level, list(log.handlers), list(log.filters)) for log in (root, absl)],
    "streams": (sys.stdout, sys.stderr, sys.excepthook),
    "flags": {name: flags.FLAGS[name].value for name in flags.FLAGS},
    "parsed": flags.FLAGS.is_parsed(),
    "threads": {t.name for t in threading.enumerate() if not t.daemon},
  }


@pytest.mark.thorough
def test_the_page_is_run(text, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache(tmp_path / "cache")))
  found = doctest.testfile(
    str(PAGE), module_relative=False, globs={"text": text, "runs": str(tmp_path)}
  )
  assert found.failed == 0 and found.attempted >= 15


def test_the_page_lists_the_functions_and_their_arguments():
  rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
  assert sorted(name for name, _ in rows) == api.__all__
  for name, arguments in rows:
    own = inspect.signature(getattr(api, name)).parameters.values()
    named = [p.name for p in own if p.kind is not p.VAR_KEYWORD]
    assert arguments.replace("*, ", "").split(", ")[: len(named)] == named


def test_it_is_there_once_it_is_asked_for():
  assert ats_jax.api is importlib.import_module("ats_jax.api")
  with pytest.raises(AttributeError, match="no attribute 'apy'"):
    _ = ats_jax.apy


@pytest.mark.thorough
def test_nothing_stays_behind(cfg, tmp_path, monkeypatch):
  """But compiled programs, in their folder: another run of the same settings finds them all."""
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  cache = tmp_path / "cache"
  deterministic = dataclasses.replace(cfg.precision, deterministic=True)
  cfg = dataclasses.replace(cfg, compilation_cache=str(cache), precision=deterministic)
  before = process_state()
  run = str(tmp_path / "run")
  assert int(api.train(cfg, run).step) == 3
  assert process_state() == before
  assert api.evaluate(run)["eval/loss"] > 0
  assert api.generate(run, "the", max_tokens=2, seed=1).startswith("the")
  assert process_state() == before
  programs = lambda: {path.name for path in cache.glob("*-cache")}
  compiled = programs()
  assert any(name.startswith("jit_train_step-") for name in compiled)
  api.train(cfg, str(tmp_path / "again"))
  assert programs() == compiled


@pytest.mark.thorough
def test_nothing_stays_behind_what_fails(cfg, tmp_path):
  before = process_state()
  steep = dataclasses.replace(cfg.optimizer, learning_rate=1e30)
  for wrong, error in (
    (dataclasses.replace(cfg, optimizer=steep, num_steps=30), FloatingPointError),
    (dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, paths=("/no/text",))), ValueError),
  ):
    with pytest.raises(error):
      api.train(wrong, str(tmp_path / error.__name__))
    assert process_state() == before
  for call in (api.evaluate, lambda run: api.generate(run, "x"), api.metrics):
    with pytest.raises(ValueError, match="Train"):
      call(str(tmp_path / "nothing"))
  assert process_state() == before


@pytest.mark.thorough
def test_two_runs_of_other_shapes_in_a_notebook(cfg, tmp_path):
  """A notebook runs its cells within an event loop."""

  async def cell(cfg: Config, name: str) -> int:
    return int(api.train(cfg, str(tmp_path / name)).step)

  wider = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, d_model=32), num_steps=2)
  assert asyncio.run(cell(cfg, "one")) == 3 and asyncio.run(cell(wider, "other")) == 2
  assert asyncio.run(cell(dataclasses.replace(cfg, num_steps=4), "one")) == 4
  assert [r["step"] for r in api.metrics(str(tmp_path / "one")) if "train/loss" in r][-1] == 4


def test_an_interrupt_saves_and_returns(cfg, tmp_path, monkeypatch):
  finish_update = Run.finish_update

  def interrupted(run, step, *args):
    finish_update(run, step, *args)
    if step == 2:
      signal.raise_signal(signal.SIGINT)

  monkeypatch.setattr(Run, "finish_update", interrupted)
  state = api.train(dataclasses.replace(cfg, num_steps=10**6), str(tmp_path / "run"))
  assert 2 <= int(state.step) <= 3
  assert (tmp_path / "run" / "checkpoints" / str(int(state.step))).is_dir()


def test_a_run_in_another_thread(cfg, tmp_path):
  """Signals are the main thread's; the run does without."""
  steps = []
  thread = threading.Thread(
    target=lambda: steps.append(int(api.train(cfg, str(tmp_path / "run")).step))
  )
  thread.start()
  thread.join(120)
  assert steps == [3]


def test_what_cannot_be_configured():
  for settings, says in (
    ({"model.num_layrs": 2}, "Did you mean model.num_layers"),
    ({"modle.num_layers": 2}, "unknown key modle"),
    ({"model.num_layers": "4"}, "model.num_layers must be int, got '4'"),
    ({"model": 3}, "model is a section"),
    ({"optimizer.b2": float("nan")}, "not a finite number"),
  ):
    with pytest.raises(ValueError, match=says):
      api.config("debug", settings)
