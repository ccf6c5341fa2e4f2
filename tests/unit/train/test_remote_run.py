"""A whole run on an object store: trained, killed, resumed, evaluated, continued."""

import importlib.util

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from bucket import become, installed, objects
from commands import called
from in_process import printed_by
from train_helpers import on_texts

from ats_jax.checkpoint import committed_steps, workdir
from ats_jax.metrics.rows import read_csv, read_jsonl
from ats_jax.metrics.writer import is_time_key
from ats_jax.orchestrator.record import ledger
from ats_jax.orchestrator.trials.snapshots import Snapshots
from ats_jax.step.program import Program
from ats_jax.store import lease, paths
from ats_jax.store.paths import Path
from ats_jax.train.initial_weights import InitialWeights
from ats_jax.train.loop import train
from ats_jax.train.open import open_run

STEPS, EVERY = 12, 4
WHOLE = Path("gs://bucket/whole")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  settings = {
    "num_steps": STEPS,
    "model.dropout": 0.1,
    "optimizer.ema_decay": 0.9,
    "optimizer.warmup_steps": 2,
    "checkpoint.every_steps": EVERY,
    "checkpoint.keep": 1,
    "checkpoint.keep_best": True,
    "eval.every_steps": EVERY,
    "eval.bigram_baseline": False,
    "log.writers": ("jsonl", "csv", "tensorboard"),
    "orchestrator.mode": "act",
    "orchestrator.check_interval": 2,
    "sample.max_tokens": 4,
  }
  return on_texts(tmp_path_factory.mktemp("remote"), settings)


@pytest.fixture(scope="module")
def content(config):
  """What is on the store after a run that nothing interrupted."""
  with installed():
    train(config(), WHOLE)
    yield objects()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.setattr(lease, "BEAT_SECS", 0.05)
  monkeypatch.setattr(lease, "DEAD_SECS", 0.3)


@pytest.fixture
def whole(content, bucket):
  become(content)
  return WHOLE


def arrays(folder, step):
  with paths.fetched(folder / "checkpoints" / str(step) / "state") as local:
    tree = ocp.PyTreeCheckpointer().restore(local)
  data = lambda x: (
    jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  )
  return {name: np.asarray(data(x)) for name, x in tree.items()}


def logged(folder):
  """All that the logs of a run hold, without what depends on time."""
  kept = lambda row: {k: v for k, v in row.items() if not is_time_key(k)}
  rows = map(kept, read_jsonl(folder / "metrics.jsonl"))
  found: dict[str, list] = {"metrics.jsonl": [row for row in rows if len(row) > 1]}
  columns, rows = read_csv(folder / "metrics.csv")
  cells = [kept(dict(zip(columns, row, strict=True))) for row in rows]
  found["metrics.csv"] = [row for row in cells if any(v for k, v in row.items() if k != "step")]
  looks = [row for row in ledger.read_lines(folder / "decisions.jsonl") if row["kind"] == "check"]
  found["decisions.jsonl"] = [(row["step"], row["reading"]["loss"]) for row in looks]
  return found


def assert_same_run(one, other):
  left, right = arrays(one, STEPS), arrays(other, STEPS)
  assert left.keys() == right.keys() and len(left) > 20
  for name, value in left.items():
    np.testing.assert_array_equal(value, right[name], err_msg=name)
  assert logged(one) == logged(other)
  extra = f"checkpoints/{STEPS}/extra.json"
  assert paths.read(one / extra) == paths.read(other / extra)


@pytest.mark.thorough
def test_a_run_on_a_store_leaves_the_files_of_a_local_one(whole, config, tmp_path):
  train(config(), Path(tmp_path))
  local = [n for n in paths.files(Path(tmp_path)) if not n.startswith("checkpoints/")]
  remote = [n for n in paths.files(whole) if not n.startswith("checkpoints/")]
  plain = lambda names: [n.split(".tfevents")[0] for n in names]
  assert plain(remote) == [n for n in plain(local) if n != ".lock"]
  assert_same_run(Path(tmp_path), whole)
  assert committed_steps(whole / "checkpoints") == committed_steps(tmp_path / "checkpoints")


@pytest.mark.thorough
def test_killed_at_any_moment_it_resumes_bit_for_bit(whole, config, bucket):
  """Before the first checkpoint, in an upload, and as a log is put."""
  broken, moments = Path("gs://bucket/broken"), []
  bucket.before = staticmethod(lambda operation, name: moments.append((name, objects())))
  train(config(), broken)
  bucket.before = staticmethod(lambda operation, name: None)
  of = lambda part: [content for name, content in moments if part in name]
  chosen = {
    0: of("/tokenizer.json")[0],
    EVERY: of(f"/checkpoints/{2 * EVERY}/manifest.json")[0],
    2 * EVERY: of("/metrics.jsonl")[-1],
  }
  for step, content in chosen.items():
    become(content)
    assert max(committed_steps(broken / "checkpoints"), default=0) >= step
    train(config(), broken)
    assert_same_run(whole, broken)


def test_the_settings_of_a_run_on_a_store_are_fixed(whole, config):
  with pytest.raises(ValueError, match=r"gs://bucket/whole holds a run with other settings"):
    train(config(model__d_model=64), whole)


def test_a_second_process_is_kept_out(whole, config):
  with (
    workdir.claim(whole, config()),
    pytest.raises(ValueError, match="another process trains in gs://bucket/whole now"),
  ):
    train(config(), whole)


def test_a_complete_run_is_opened_again_and_changes_nothing(whole, config):
  before = logged(whole)
  train(config(), whole)
  assert logged(whole) == before


def test_a_new_run_begins_with_weights_from_a_store(whole, config, tmp_path, monkeypatch):
  monkeypatch.setattr(Program, "compile_train_step", lambda *args: None)  # it is only opened
  cfg = config(seed=7)
  with open_run(cfg, Path(tmp_path), Snapshots.of(cfg.orchestrator), InitialWeights(whole)) as run:
    weights = jax.device_get(run.state.model)
  saved = arrays(whole, STEPS)
  np.testing.assert_array_equal(weights.embed.weight[...], saved["ema/embed"])


def test_commands_read_a_run_on_a_store(whole):
  folder = f"--workdir={whole}"
  loss = [r["eval/loss"] for r in read_jsonl(whole / "metrics.jsonl") if "eval/loss" in r][-1]
  assert f"eval/loss {loss:.6g}\n" in printed_by("evaluate", folder)
  assert printed_by("generate", folder, "--prompt=alpha", "--max_tokens=3").startswith("alpha")
  assert "replayed: the same decisions" in printed_by("decisions", str(whole), "--replay")
  assert f"{whole}: finished at step {STEPS}" in printed_by(
    "forecast", folder, "--metric=train/loss"
  )


def test_event_files_on_a_store_are_complete(whole):
  (name,) = [n for n in objects() if ".tfevents." in n]
  tags = objects()[name]
  hparams = 1  # their page names both as results
  assert tags.count(b"train/loss") == STEPS + hparams
  assert tags.count(b"eval/loss") == STEPS // EVERY + hparams


def test_a_writer_of_tensorflow_is_refused(config, bucket):
  with pytest.raises(ValueError, match=r"'clu' writes to local folders only, not to gs://bucket/r"):
    train(config(log__writers=("clu",)), Path("gs://bucket/r"))


@pytest.mark.parametrize("name", ["compilation_cache", "data__cache_dir", "checkpoint__local_dir"])
def test_folders_that_must_be_local_are_refused_on_a_store(config, name):
  with pytest.raises(ValueError, match=r"'gs://bucket/x' is on a store\. It must be local"):
    config(checkpoint__local_every=10 if "local_dir" in name else 0, **{name: "gs://bucket/x"})


def test_a_store_that_cannot_be_reached_is_one_line():
  for words in (
    "train --config=configs/debug.py --workdir={}",
    "train --config=configs/debug.py --workdir=x --init_from={}",
    "evaluate --workdir={}",
    "generate --workdir={}",
    "forecast --workdir={}",
    "decisions {}",
  ):
    said = called(*words.format("foo://bucket/run").split()).error()
    assert said.startswith("foo://bucket/run: expected a local path or one of gs://, s3://, az://")
    if importlib.util.find_spec("adlfs") is None:
      said = called(*words.format("az://bucket/run").split()).error()
      assert said.startswith("az://bucket/run needs adlfs, which is not installed: pip install")
