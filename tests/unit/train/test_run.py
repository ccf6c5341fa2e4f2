"""How a run begins: from the weights of another run, for so many epochs, watched or not."""

import dataclasses
import gc
import json
import math
import shutil
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import named_leaves, tiny_config
from train_helpers import assert_same, logged, on_texts

from ats_jax.checkpoint import CheckpointManager, abstract_like, load_extra, workdir
from ats_jax.config.build import resolve
from ats_jax.config.schema import CheckpointConfig
from ats_jax.data.sources import HELD_OUT, check_same_text, open_data, open_eval_sets
from ats_jax.data.splits import open_datasets
from ats_jax.inference.load import load_run
from ats_jax.model.numerics import stored_dtype
from ats_jax.model.param import is_variable
from ats_jax.orchestrator.no_supervisor import NoSupervisor
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.planner.budget import budget
from ats_jax.planner.describe import describe
from ats_jax.step.program import Program, make_program
from ats_jax.step.schedule import learning_rate
from ats_jax.train import open as open_module
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.num_steps import with_num_steps
from ats_jax.train.open import find_resume_point, open_run

ACTS = {"orchestrator__mode": "act", "orchestrator__check_interval": 2}
TRAINED = {"checkpoint__every_steps": 3, "optimizer__ema_decay": 0.5}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return on_texts(tmp_path_factory.mktemp("run"), {})


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
  """The workdir of a finished run with checkpoints at 3 and 6, and its last state."""
  folder = tmp_path_factory.mktemp("trained")
  return folder, train(config(**TRAINED), folder)


@pytest.fixture
def interrupted(trained, tmp_path):
  """That workdir without its last checkpoint."""
  folder = shutil.copytree(trained[0], tmp_path / "interrupted")
  shutil.rmtree(folder / "checkpoints" / "6")
  return folder


@pytest.fixture
def no_step(monkeypatch):
  """Runs are opened only: their step is not compiled."""
  monkeypatch.setattr(Program, "compile_train_step", lambda *args: None)


def opened(cfg, folder, initial=None):
  return open_run(cfg, folder, Snapshots.of(cfg.orchestrator), initial)


def first_weights(cfg, folder, initial):
  with opened(cfg, folder, initial) as run:
    return jax.device_get((run.state.model, run.state.opt_state, run.step))


def rounded(model):
  """As a model of bfloat16 stores it."""
  cast = lambda v: jax.tree.map(lambda x: x.astype(stored_dtype(v.role, jnp.dtype("bfloat16"))), v)
  return jax.tree.map(cast, model, is_leaf=is_variable)


def test_a_run_begins_with_the_averaged_weights_of_another(
  config, trained, interrupted, tmp_path, no_step
):
  """Of the last step or a chosen one, in a type of its own; one that goes on keeps its own."""
  source, state = trained
  cfg = config(seed=7, precision__param_dtype="bfloat16")
  model, opt_state, step = first_weights(cfg, tmp_path / "new", InitialWeights(source))
  assert step == 0
  average = rounded(state.ema)
  assert_same(model, average)
  assert not any(np.any(x) for x in jax.tree.leaves(opt_state))  # moments are not taken along
  earlier, *_ = first_weights(cfg, tmp_path / "earlier", InitialWeights(source, "3"))
  assert np.any(jax.tree.leaves(earlier)[0] != jax.tree.leaves(average)[0])

  own, _, step = first_weights(config(**TRAINED), interrupted, InitialWeights(source))
  assert step == 3
  for part in (state.model, state.ema):
    assert np.any(np.asarray(jax.tree.leaves(own)[0]) != np.asarray(jax.tree.leaves(part)[0]))


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_a_run_begins_with_weights_in_bfloat16(config, tmp_path, no_step, own):
  """What is in float32 there too loses nothing."""
  moe = {"moe__num_experts": 2, "moe__router_bias": True}
  with opened(config(precision__param_dtype="bfloat16", **moe), tmp_path / "source") as run:
    finer = jax.tree.map(lambda x: x + jnp.asarray(1e-5, x.dtype), run.state.model)
    run.checkpoints.save(1, dataclasses.replace(run.state, model=finer), {})
  cfg = config(seed=7, precision__param_dtype=own, **moe)
  model, *_ = first_weights(cfg, tmp_path / "new", InitialWeights(tmp_path / "source"))
  got = named_leaves(model)
  for name, want in named_leaves(finer).items():
    np.testing.assert_array_equal(got[name], want.astype(got[name].dtype), err_msg=name)
  assert model.embed.weight.dtype == jnp.float32


def test_weights_that_cannot_be_taken(config, trained, tmp_path, no_step):
  for changes, source, step, says in (
    ({}, trained[0], "4", "no checkpoint 4 in"),
    ({}, tmp_path / "nothing", "latest", "holds no run"),
    ({"model__d_model": 64}, trained[0], "latest", "does not fit: "),
    (
      {"data__tokenizer": "bpe", "data__bpe_vocab_size": 300}, trained[0], "latest",
      r"its tokenizer is not.*--config\.data\.tokenizer=.*/tokenizer\.json",
    ),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=says):
      first_weights(config(**changes), tmp_path / "run", InitialWeights(source, step))
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_another_batch_size_goes_on_with_the_next_row(config, interrupted, no_step, caplog):
  """Lengths in epochs count what earlier steps read."""
  was = config().data.batch_size
  cfg = config(data__batch_size=2 * was, num_epochs=2.0, **TRAINED)
  with caplog.at_level("INFO", logger="absl"), opened(cfg, interrupted) as run:
    assert run.step == 3
    rows = np.arange(3 * was, 5 * was)[None]
    batch = next(run.batches)
    np.testing.assert_array_equal(batch["tokens"], run.train_set.read(rows)["tokens"])
    assert run.position()["position"]["row"] == 5 * was
    left = 2 * run.train_set.info.num_rows - 3 * was
    assert run.cfg.num_steps == 3 + math.ceil(left / (2 * was))
  assert f"data.batch_size: {was} -> {2 * was}" in caplog.text
  assert f"run: 3 steps read {3 * was} rows; {run.cfg.num_steps - 3} more steps x" in caplog.text


def test_the_same_text_may_have_another_path(config, interrupted, no_step, tmp_path, caplog):
  (old,) = config().data.paths
  moved = shutil.copytree(old, tmp_path / "moved")
  with (
    caplog.at_level("INFO", logger="absl"),
    opened(config(data__paths=(str(moved),), **TRAINED), interrupted) as run,
  ):
    assert run.step == 3
  assert f"data.paths: {(old,)!r} -> {(str(moved),)!r}" in caplog.text
  sorted(moved.iterdir())[0].write_text("other text")
  with (
    pytest.raises(ValueError, match="the run was trained on other data"),
    opened(config(data__paths=(str(moved),), **TRAINED), interrupted),
  ):
    pass


def test_held_out_text_is_compared_too(config, trained):
  extra = load_extra(trained[0] / "checkpoints", 3)
  sets = open_eval_sets(config().data, open_data(config().data, config().seed)[1])
  assert extra[HELD_OUT] and [each.name for each in sets] == list(extra[HELD_OUT])
  for saved in (extra[HELD_OUT], {}, {"of a set that is gone": "1"}):
    check_same_text(sets, saved)
  with pytest.raises(ValueError, match="evaluated on other text: that of eval/ has changed"):
    check_same_text(sets, {"": "1"})


def test_a_run_goes_back_to_a_checkpoint_once(config, trained, tmp_path, no_step, caplog):
  """Later ones are set aside and rows of metrics cut; whoever starts the command again goes on."""
  cfg, folder = config(**TRAINED), shutil.copytree(trained[0], tmp_path / "run")
  checkpoints = folder / "checkpoints"
  with pytest.raises(ValueError, match=r"no checkpoint 4 in .*there are \[3, 6\]"):
    train(cfg, folder, resume_step=4)
  assert (checkpoints / "6").exists()
  caplog.set_level("INFO", logger="absl")
  with open_run(cfg, folder, resume_step=3) as run:
    assert run.step == 3
  assert f"the later one 6 is now {checkpoints / '6.after_3'}" in caplog.text
  assert max(logged(folder, "train/loss")) == 3
  shutil.copytree(checkpoints / "6.after_3", checkpoints / "6")
  with open_run(cfg, folder, resume_step=3) as run:
    assert run.step == 6
  assert "was done at an earlier start" in caplog.text
  (checkpoints / "resume_step").unlink()
  with open_run(cfg, folder, resume_step=3) as run:
    assert run.step == 3
  assert (checkpoints / "6.after_3.2").exists() and (checkpoints / "6.after_3").exists()


def test_a_run_that_went_back_makes_the_same_steps_again(config, trained, tmp_path):
  folder = shutil.copytree(trained[0], tmp_path / "run")
  assert_same(train(config(**TRAINED), folder, resume_step=3), trained[1])


def test_checkpoints_of_another_run_are_refused(config, trained, tmp_path, no_step):
  folder = shutil.copytree(trained[0], tmp_path / "run")
  own = (folder / "run_id").read_text().strip()
  (folder / "run_id").write_text("0123456789abcdef\n")
  says = rf"\d is of another run: {own}, expected 0123456789abcdef"
  with pytest.raises(ValueError, match=says):
    train(config(**TRAINED), folder)
  with pytest.raises(ValueError, match=says), load_run(folder):
    pass


def budgeted(config, **changes):
  changes = {"length": "budget", "num_steps": 400, "optimizer__warmup_fraction": 0.1} | changes
  return config(**changes)


@pytest.mark.parametrize("most", [1.5, 1e5])
def test_a_text_too_small_for_the_optimum_is_seen_as_often_as_is_allowed(config, most):
  cfg = budgeted(config, most_epochs=most)
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  known, why = with_num_steps(cfg, train_set)
  assert budget(cfg, unique_tokens=train_set.info.num_tokens)["optimal"]["epochs"] is None
  assert known.num_steps == math.ceil(most * train_set.info.num_rows / cfg.data.batch_size)
  assert known.length == "budget"
  assert f"least_epochs=0, most_epochs={most:g}" in why and "more than any number of epochs" in why


def test_an_optimum_within_the_bounds_is_taken(config):
  cfg = budgeted(config, most_epochs=5.0)
  plan = lambda unique: budget(cfg, unique_tokens=unique)
  wanted = plan(0)["optimal"]["tokens"]
  here = plan(wanted / 2.5)
  assert here["budget"]["epochs"] == pytest.approx(here["optimal"]["epochs"])
  assert 2.5 < here["budget"]["epochs"] < 3  # repeated tokens are worth a little less
  assert plan(0)["budget"]["tokens"] == wanted  # nothing is seen twice
  assert plan(10 * wanted)["budget"]["epochs"] == pytest.approx(0.1)
  at_least = dataclasses.replace(cfg, least_epochs=3.0)
  assert budget(at_least, unique_tokens=10 * wanted)["budget"]["epochs"] == pytest.approx(3)


@pytest.mark.parametrize("reading", ["whole", "streaming"])
def test_steps_that_cost_so_many_flops(config, reading):
  """Steps made with another batch size count by the rows that they read."""
  streamed = {"data__validation_fraction": 0.0, "eval__every_steps": 0}
  changes = streamed if reading == "streaming" else {}
  cfg = config(length="flops", train_flops=1e9, data__reading=reading, **changes)
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  known, why = with_num_steps(cfg, train_set)
  per_token = describe(resolve(cfg, train_set.info.tokenizer.vocab_size))["flops_per_token"]
  per_row = per_token["training"] * cfg.data.seq_len
  assert known.num_steps == math.ceil(1e9 / per_row / cfg.data.batch_size) > 1
  assert why == f"train_flops=1e+09, {per_token['training']:.4g} a token"
  rows = cfg.data.batch_size // 2
  later, _ = with_num_steps(cfg, train_set, done=(1, rows))
  assert later.num_steps == 1 + math.ceil((1e9 / per_row - rows) / cfg.data.batch_size)
  with pytest.raises(ValueError, match=r"num_steps=.* is too large"):
    with_num_steps(dataclasses.replace(cfg, train_flops=1e30), train_set)


def test_epochs_in_place_of_steps(config, tmp_path):
  cfg = config(num_epochs=1.5, num_steps=400, optimizer__warmup_steps=1)
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  for epochs in (1.5, 2.0):
    known, _ = with_num_steps(dataclasses.replace(cfg, num_epochs=epochs), train_set)
    assert known.num_steps == math.ceil(epochs * train_set.info.num_rows / cfg.data.batch_size)
  cfg = config(num_epochs=0.1, optimizer__warmup_steps=300)
  with pytest.raises(ValueError, match=r"optimizer\.warmup_steps=300 exceeds num_steps=\d+"):
    train(cfg, tmp_path)


@pytest.mark.thorough
def test_a_run_as_long_as_the_budget_says(config, tmp_path, caplog):
  """The schedule ends with it, the workdir says it, and a run that goes on keeps it."""
  cfg = budgeted(config, most_epochs=1.5, optimizer__schedule="linear", checkpoint__every_steps=3)
  train_set, _ = open_datasets(cfg.data, cfg.seed)
  steps = math.ceil(1.5 * train_set.info.num_rows / cfg.data.batch_size)
  unused = "of 384 rows of the embedding and of the head"
  with caplog.at_level("WARNING", logger="absl"):
    assert int(train(cfg, tmp_path).step) == steps
  assert unused in caplog.text
  assert workdir.load_config(tmp_path).num_steps == steps
  said = json.loads((tmp_path / "metadata.json").read_text())["run"]["length by"]
  assert said.startswith("1.50 epochs: ") and "of this text" in said
  rates = list(logged(tmp_path, "train/learning_rate").values())
  planned = dataclasses.replace(cfg, num_steps=steps)
  np.testing.assert_allclose(rates, learning_rate(planned, np.arange(steps)), rtol=1e-6)

  caplog.clear()
  shutil.rmtree(tmp_path / "checkpoints" / str(steps))
  assert int(train(cfg, tmp_path).step) == steps
  assert unused not in caplog.text  # once for each run
  assert workdir.load_config(tmp_path).num_steps == steps


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"num_epochs": 2.0}, "num_epochs=2.0 and length=budget both say when to end"),
    ({"least_epochs": 5.0}, "least_epochs=5.0 exceeds most_epochs=4.0"),
    ({"most_epochs": 0.0}, "most_epochs=0 trains nothing"),
    ({"length": "flops"}, "length=flops needs train_flops"),
  ],
)
def test_lengths_that_contradict(config, changes, says):
  with pytest.raises(ValueError, match=says):
    budgeted(config, **changes)


def test_nothing_holds_a_run_that_is_over(config, tmp_path, no_step):
  """Or else its state would be on the devices beside that of the run that is opened next."""
  gc.collect()
  gc.disable()
  try:
    with opened(config(**ACTS), tmp_path) as run:
      over = weakref.ref(run)
    del run
    assert over() is None
  finally:
    gc.enable()


def test_a_run_that_is_complete_compiles_no_step_and_nobody_watches(config, trained, tmp_path):
  shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
  with opened(config(**TRAINED), tmp_path) as run:
    assert run.step == 6 and run.steps.pending.key is None
    assert isinstance(run.supervisor, NoSupervisor) and run.supervisor.saved() == {}
    assert run.position() == {"position": {"row": 48, "data": run.train_set.info.fingerprint}}


@pytest.mark.thorough
def test_the_step_that_is_compiled_from_shapes_is_the_one_of_the_state(config, tmp_path):
  cfg = config(optimizer__ema_decay=0.5, **ACTS)
  with opened(cfg, tmp_path) as run:
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


def test_state_and_step_may_be_ready_in_any_order(
  config, trained, interrupted, tmp_path, monkeypatch
):
  """The step first as a run resumes, the state first as one begins."""
  ready = threading.Event()
  ready_first = {
    interrupted: (Program, "compile_train_step"),
    tmp_path / "new": (open_module, "restored_or_new"),
  }
  for folder, first in ready_first.items():
    (second,) = set(ready_first.values()) - {first}
    early, late = getattr(*first), getattr(*second)

    def signalling(*args, early=early):
      result = early(*args)
      ready.set()
      return result

    def waiting(*args, late=late):
      assert ready.wait(60)
      return late(*args)

    with monkeypatch.context() as patch:
      ready.clear()
      patch.setattr(*first, signalling)
      patch.setattr(*second, waiting)
      assert_same(train(config(**TRAINED), folder).model, trained[1].model)


class Halved(BaseException):
  """The step is compiled again for half the micro-batch."""


def test_what_fails_in_the_compiler_is_said_where_the_step_is_asked_for(
  config, tmp_path, monkeypatch
):
  """What is too large for memory is tried once more, by a run that may act."""

  def fail(program, *args):
    if program.cfg.step.accum_steps == 2:
      raise Halved
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

  monkeypatch.setattr(Program, "compile_train_step", fail)
  planted = pytest.raises(jax.errors.JaxRuntimeError, match="planted")
  with opened(config(), tmp_path / "observed") as run, planted:
    run.compiled_step(1)
  with pytest.raises(Halved):
    train(config(data__batch_size=16, **ACTS), tmp_path / "acting")


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
