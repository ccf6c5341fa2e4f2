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
from ats_jax.verbs import cli

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
  """But compiled programs, in their folder: another run of the same settings finds them all.

  Also in a notebook, which runs its cells within an event loop.
  """
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  cache, run = tmp_path / "cache", str(tmp_path / "run")
  deterministic = dataclasses.replace(cfg.precision, deterministic=True)
  cfg = dataclasses.replace(cfg, compilation_cache=str(cache), precision=deterministic)

  async def cell(cfg: Config, folder: str) -> int:
    return int(api.train(cfg, folder).step)

  before = process_state()
  assert asyncio.run(cell(cfg, run)) == 3
  assert process_state() == before
  assert api.evaluate(run)["eval/loss"] > 0
  assert api.generate(run, "the", max_tokens=2, seed=1).startswith("the")
  with api.Engine(run, rows=1) as engine:
    asked = {engine.submit(text, max_tokens=2, seed=1): text for text in ("the", "a")}
    with pytest.raises(ValueError, match="not trained on conversations"):
      engine.submit([{"role": "user", "content": "the"}], max_tokens=2)
    with pytest.raises(ValueError, match="temperature"):
      engine.submit("the", max_tokens=2, temperature=-1)
    events = list(engine.events())
  assert {event.id for event in events if event.finished == "length"} == asked.keys()
  with pytest.raises(ValueError, match="this engine was closed"):
    engine.submit("the")
  assert process_state() == before
  programs = lambda: {path.name for path in cache.glob("*-cache")}
  compiled = programs()
  assert any(name.startswith("jit_train_step-") for name in compiled)
  assert asyncio.run(cell(cfg, str(tmp_path / "again"))) == 3
  assert programs() == compiled
  assert [row["step"] for row in api.metrics(run) if "train/loss" in row] == [1, 2, 3]


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
  for call in (api.evaluate, lambda run: api.generate(run, "x"), api.metrics, api.Engine):
    with pytest.raises(ValueError, match="Train"):
      call(str(tmp_path / "nothing"))
  assert process_state() == before


def test_an_interrupt_saves_and_returns(cfg, tmp_path, monkeypatch):
  """Signals are the main thread's; a run in another thread does without."""
  finish_update, main = Run.finish_update, threading.current_thread()

  def interrupted(run, step, *args):
    finish_update(run, step, *args)
    if step == 1 and threading.current_thread() is main:
      signal.raise_signal(signal.SIGINT)

  monkeypatch.setattr(Run, "finish_update", interrupted)
  steps, train = {}, lambda name: int(api.train(cfg, str(tmp_path / name)).step)
  steps["main"] = train("main")
  thread = threading.Thread(target=lambda: steps.update(other=train("other")))
  thread.start()
  thread.join(120)
  assert steps["main"] < steps["other"] == 3
  assert (tmp_path / "main" / "checkpoints" / str(steps["main"])).is_dir()


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


def test_libraries_are_as_quiet_as_on_the_command_line(caplog):
  """Their information is left out for as long as a call lasts; warnings and our own lines stay."""
  absl = logging.getLogger("absl")
  say = lambda path, level: absl.handle(absl.makeRecord("absl", level, path, 1, path, (), None))
  own = str(REPOSITORY / "ats_jax" / "train" / "run.py")
  with caplog.at_level("INFO"), cli.short_log():
    for path in (own, "/lib/orbax/a.py"):
      say(path, logging.INFO)
    say("/lib/orbax/b.py", logging.WARNING)
  say("/lib/orbax/c.py", logging.WARNING)
  assert caplog.messages == [own, "/lib/orbax/b.py", "/lib/orbax/c.py"]
