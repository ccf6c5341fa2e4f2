"""How a run begins: from the weights of another run, for so many epochs, watched or not."""

import dataclasses
import gc
import json
import math
import random
import shutil
import threading
import weakref

import jax
import numpy as np
import pytest
from helpers import CACHED, named_leaves, tiny_config

from ats_jax.checkpoint import CheckpointManager, abstract_like, workdir
from ats_jax.config.schema import CheckpointConfig
from ats_jax.data.splits import open_datasets
from ats_jax.metrics.rows import read_jsonl
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.planner.budget import budget
from ats_jax.step.program import Program, make_program
from ats_jax.step.schedule import learning_rate
from ats_jax.train import open as open_module
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.num_steps import with_num_steps
from ats_jax.train.open import find_resume_point, open_run

ACTS = {"orchestrator__mode": "act", "orchestrator__check_interval": 2}
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
  for i in range(30):
    (folder / f"{i}.txt").write_text(" ".join(rng.choices(WORDS, k=rng.randint(5, 60))))
  return folder


def config(texts, **changes):
  settings = CACHED | {
    "num_steps": 4,
    "model.vocab_size": 384,
    "data.paths": (str(texts),),
    "data.validation_fraction": 0.3,
    "data.cache_dir": str(texts.parent / "cache"),
    "log.writers": ("jsonl",),
    "log.every_steps": 1,
    "log.progress": False,
    "sample.max_tokens": 0,
  }
  return tiny_config(settings | {name.replace("__", "."): v for name, v in changes.items()})


TRAINED = {"checkpoint__every_steps": 2, "optimizer__ema_decay": 0.5}


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
  """The workdir of a finished run with checkpoints at 2 and 4, and its last state."""
  folder = tmp_path_factory.mktemp("trained")
  return folder, train(config(texts, **TRAINED), folder)


def first_weights(cfg, folder, init):
  with open_run(cfg, folder, Snapshots.of(cfg.orchestrator), init) as run:
    return jax.device_get((run.state.model, run.state.opt_state, run.step))


@pytest.mark.thorough
def test_a_run_begins_with_the_averaged_weights_of_another(texts, trained, tmp_path):
  source, state = trained
  model, opt_state, step = first_weights(config(texts, seed=7), tmp_path, InitialWeights(source))
  assert step == 0
  for new, ema in zip(jax.tree.leaves(model), jax.tree.leaves(state.ema), strict=True):
    np.testing.assert_array_equal(new, ema.astype(new.dtype))
  assert not any(np.any(x) for x in jax.tree.leaves(opt_state))  # moments are not taken along


def test_weights_of_a_chosen_step_and_in_another_dtype(texts, trained, tmp_path):
  source, state = trained
  cfg = config(texts, precision__param_dtype="bfloat16")
  model, *_ = first_weights(cfg, tmp_path, InitialWeights(source, "2"))
  last = jax.tree.leaves(state.ema)[0]
  first = jax.tree.leaves(model)[0]
  assert first.dtype == "bfloat16" and first.shape == last.shape
  assert np.any(np.asarray(first, np.float32) != np.asarray(last.astype("bfloat16"), np.float32))


def test_a_run_that_goes_on_keeps_its_own_weights(texts, trained, tmp_path):
  source, state = trained
  own = tmp_path / "own"
  shutil.copytree(source, own)
  shutil.rmtree(own / "checkpoints" / "4")
  model, _, step = first_weights(config(texts, **TRAINED), own, InitialWeights(source))
  assert step == 2
  for part in (state.model, state.ema):
    assert np.any(np.asarray(jax.tree.leaves(model)[0]) != np.asarray(jax.tree.leaves(part)[0]))


def test_weights_that_cannot_be_taken(texts, trained, tmp_path):
  for changes, step, says in (
    ({}, "3", "no checkpoint 3 in"),
    ({"model__d_model": 64}, "latest", "does not fit: "),
    ({"data__tokenizer": "bpe", "data__bpe_vocab_size": 300}, "latest", "its tokenizer is not"),
  ):
    with pytest.raises(ValueError, match=says):
      first_weights(config(texts, **changes), tmp_path, InitialWeights(trained[0], step))
    shutil.rmtree(tmp_path)


@pytest.mark.thorough
def test_the_tokenizer_of_the_other_run_is_taken_along(texts, tmp_path):
  bpe = {"data__tokenizer": "bpe", "data__bpe_vocab_size": 300}
  train(config(texts, num_steps=1, **bpe), tmp_path / "source")
  other = tmp_path / "other"
  other.mkdir()
  for i in range(30):
    (other / f"{i}.txt").write_text(f"entirely different prose, number {i}. " * 9)
  source, cfg = InitialWeights(tmp_path / "source"), config(other, **bpe)
  with pytest.raises(ValueError, match=r"--config\.data\.tokenizer=.*source/tokenizer\.json"):
    first_weights(cfg, tmp_path / "refused", source)
  own = str(tmp_path / "source" / "tokenizer.json")
  data = dataclasses.replace(cfg.data, tokenizer=own)
  _, _, step = first_weights(dataclasses.replace(cfg, data=data), tmp_path / "new", source)
  assert step == 0


def test_no_run_to_begin_from(texts, tmp_path):
  with pytest.raises(ValueError, match="holds no run"):
    first_weights(config(texts), tmp_path / "new", InitialWeights(tmp_path / "nothing"))


@pytest.mark.thorough
def test_epochs_in_place_of_steps(texts, tmp_path):
  cfg = config(texts, num_epochs=1.5, num_steps=400, optimizer__warmup_steps=1)
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  steps = math.ceil(1.5 * train_set.info.num_rows / cfg.data.batch_size)
  state = train(cfg, tmp_path)
  assert int(state.step) == steps
  assert workdir.load_config(tmp_path).num_steps == steps  # the schedule's, for who reads it
  losses = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in row]
  assert len(losses) == steps
  assert int(train(cfg, tmp_path).step) == steps  # complete: nothing more is trained
  longer = dataclasses.replace(cfg, num_epochs=2.0)
  assert int(train(longer, tmp_path).step) == math.ceil(2 * train_set.info.num_rows / 8)


def test_rules_of_the_number_of_steps_hold_for_epochs(texts, tmp_path):
  cfg = config(texts, num_epochs=0.1, optimizer__warmup_steps=300)
  with pytest.raises(ValueError, match=r"optimizer\.warmup_steps=300 exceeds num_steps=\d+"):
    train(cfg, tmp_path)


def test_nobody_watches_unless_asked(texts, tmp_path):
  cfg = config(texts)
  with open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run:
    assert isinstance(run.supervisor, NoSupervisor) and run.supervisor.saved() == {}
    assert run.position() == {"position": {"row": 0, "data": run.train_set.info.fingerprint}}


def test_nothing_holds_a_run_that_is_over(texts, tmp_path):
  """Or else its state would be on the devices beside that of the run that is opened next."""
  cfg = config(texts, orchestrator__mode="observe", orchestrator__check_interval=2)
  gc.collect()
  gc.disable()
  try:
    with open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run:
      over = weakref.ref(run)
    del run
    assert over() is None
  finally:
    gc.enable()


def test_data_that_changed_is_refused(texts, tmp_path):
  other = tmp_path / "texts"
  shutil.copytree(texts, other)
  cfg = config(other, num_steps=1)
  train(cfg, tmp_path / "run")
  (other / "31.txt").write_text("one more")
  with pytest.raises(ValueError, match=r"was trained on other data: .*now [0-9a-f]+"):
    train(dataclasses.replace(cfg, num_steps=2), tmp_path / "run")


@pytest.mark.thorough
def test_the_step_that_is_compiled_from_shapes_is_the_one_of_the_state(texts, tmp_path):
  cfg = config(texts, optimizer__ema_decay=0.5, **ACTS)
  with open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run:
    program, rules = run.program, run.program.training_rules(1)
    abstract = abstract_like(program.init(abstract=True), jax.sharding.get_mesh())
    batch = run.next_batch()
    of_shapes, of_state = (
      program.train_step.lower(state, batch, rules) for state in (abstract, run.state)
    )
    assert of_shapes.as_text() == of_state.as_text()
    assert run.steps.pending.key == (rules, cfg.data.seq_len)
    begun = run.steps.pending.step
    run.compiled_step(1)
    assert run.steps.pending.step is begun  # nothing was compiled twice


def slowly(monkeypatch, where, name, event):
  """Have a function of the opening wait for `event`."""
  function = getattr(where, name)

  def waiting(*args, **kwargs):
    assert event.wait(60)
    return function(*args, **kwargs)

  monkeypatch.setattr(where, name, waiting)


def test_state_and_step_may_be_ready_in_any_order(texts, trained, tmp_path, monkeypatch):
  """The step first as a run resumes, the state first as one begins."""
  cfg, ready = config(texts, **TRAINED), threading.Event()
  first_of_two = (Program, "compile_train_step"), (open_module, "restored_or_new")

  for (first, name), (second, other) in (first_of_two, first_of_two[::-1]):
    folder, function = tmp_path / name, getattr(first, name)
    if first is Program:
      shutil.copytree(trained[0], folder)
      shutil.rmtree(folder / "checkpoints" / "4")

    def signalling(*args, function=function):
      result = function(*args)
      ready.set()
      return result

    with monkeypatch.context() as patch:
      ready.clear()
      patch.setattr(first, name, signalling)
      slowly(patch, second, other, ready)
      state = train(cfg, folder)
    for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(trained[1].model), strict=True):
      np.testing.assert_array_equal(a, b)


def test_what_fails_in_the_compiler_is_said_where_the_step_is_asked_for(
  texts, tmp_path, monkeypatch
):
  def fail(program, *args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

  monkeypatch.setattr(Program, "compile_train_step", fail)
  cfg = config(texts)
  planted = pytest.raises(jax.errors.JaxRuntimeError, match="planted")
  with open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run, planted:
    run.compiled_step(1)


def test_a_snapshot_has_the_structure_of_the_program_that_goes_on(mesh, tmp_path):
  """What layers keep makes another program of the same arrays: compiled, it takes no other."""
  before, after = (make_program(tiny_config({"step.remat": kept})) for kept in ("none", "full"))
  state, snapshots = before.init(), Snapshots(every_steps=1, max_bytes=2**40)
  snapshots.start(3, state)
  abstract = abstract_like(after.init(abstract=True), mesh)
  assert jax.tree.structure(abstract) != jax.tree.structure(state)
  with CheckpointManager(tmp_path, CheckpointConfig()) as checkpoints:
    origin = find_resume_point(checkpoints, snapshots)
  restored = origin.restore(abstract)
  assert origin.step == 3 and jax.tree.structure(restored) == jax.tree.structure(abstract)
  for (name, got), want in zip(
    named_leaves(restored.model).items(), named_leaves(state.model).values(), strict=True
  ):
    np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.thorough
def test_memory_that_runs_out_in_the_compiler_halves_the_micro_batch(texts, tmp_path, monkeypatch):
  compile_train_step = Program.compile_train_step

  def too_large(program, *args):
    if program.cfg.step.accum_steps == 1:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")
    return compile_train_step(program, *args)

  monkeypatch.setattr(Program, "compile_train_step", too_large)
  assert int(train(config(texts, data__batch_size=16, **ACTS), tmp_path).step) == 4


def test_a_run_that_is_complete_compiles_no_step(texts, trained, tmp_path):
  shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
  cfg = config(texts, **TRAINED)
  with open_run(cfg, tmp_path, Snapshots.of(cfg.orchestrator)) as run:
    assert run.step == 4 and run.steps.pending.key is None


def budgeted(texts, **changes):
  return config(texts, length="budget", num_steps=400, optimizer__warmup_fraction=0.1, **changes)


@pytest.mark.parametrize("most", [1.5, 1e5])
def test_a_text_too_small_for_the_optimum_is_seen_as_often_as_is_allowed(texts, most):
  cfg = budgeted(texts, most_epochs=most)
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  known, why = with_num_steps(cfg, train_set)
  assert budget(cfg, unique_tokens=train_set.info.num_tokens)["optimal"]["epochs"] is None
  assert known.num_steps == math.ceil(most * train_set.info.num_rows / cfg.data.batch_size)
  assert known.length == "budget"
  assert f"least_epochs=0, most_epochs={most:g}" in why and "more than any number of epochs" in why


def test_an_optimum_within_the_bounds_is_taken(texts):
  cfg = budgeted(texts, most_epochs=5.0)
  plan = lambda unique: budget(cfg, unique_tokens=unique)
  wanted = plan(0)["optimal"]["tokens"]
  here = plan(wanted / 2.5)
  assert here["budget"]["epochs"] == pytest.approx(here["optimal"]["epochs"])
  assert 2.5 < here["budget"]["epochs"] < 3  # repeated tokens are worth a little less
  assert plan(0)["budget"]["tokens"] == wanted  # nothing is seen twice
  assert plan(10 * wanted)["budget"]["epochs"] == pytest.approx(0.1)
  at_least = dataclasses.replace(cfg, least_epochs=3.0)
  assert budget(at_least, unique_tokens=10 * wanted)["budget"]["epochs"] == pytest.approx(3)


@pytest.mark.thorough
def test_a_run_as_long_as_the_budget_says(texts, tmp_path):
  """The schedule ends with it, the workdir says it, and a run that goes on keeps it."""
  cfg = budgeted(texts, most_epochs=1.5, optimizer__schedule="linear", checkpoint__every_steps=3)
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  steps = math.ceil(1.5 * train_set.info.num_rows / cfg.data.batch_size)
  assert int(train(cfg, tmp_path).step) == steps
  assert workdir.load_config(tmp_path).num_steps == steps
  said = json.loads((tmp_path / "metadata.json").read_text())["run"]["length by"]
  assert said.startswith("1.50 epochs: ") and "of this text" in said
  rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in row]
  rates = [row["train/learning_rate"] for row in rows]
  assert len(rates) == steps
  planned = dataclasses.replace(cfg, num_steps=steps)
  np.testing.assert_allclose(rates, learning_rate(planned, np.arange(steps)), rtol=1e-6)
  shutil.rmtree(tmp_path / "checkpoints" / str(steps))
  assert int(train(cfg, tmp_path).step) == steps
  assert workdir.load_config(tmp_path).num_steps == steps


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"num_epochs": 2.0}, "num_epochs=2.0 and length=budget both say when to end"),
    ({"least_epochs": 5.0}, "least_epochs=5.0 exceeds most_epochs=4.0"),
    ({"most_epochs": 0.0}, "most_epochs=0 trains nothing"),
  ],
)
def test_lengths_that_contradict(texts, changes, says):
  with pytest.raises(ValueError, match=says):
    budgeted(texts, **changes)


def test_a_table_with_rows_that_no_token_uses(texts, tmp_path, caplog):
  """One warning at the start, none when the run goes on."""
  with caplog.at_level("WARNING", logger="absl"):
    train(config(texts, model__vocab_size=1024, num_steps=1), tmp_path / "wide")
    assert "of 1,024 rows of the embedding and of the head" in caplog.text
    caplog.clear()
    train(config(texts, model__vocab_size=1024, num_steps=2), tmp_path / "wide")
  assert "vocabulary:" not in caplog.text
