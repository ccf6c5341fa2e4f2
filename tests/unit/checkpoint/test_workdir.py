"""A workdir belongs to one run: what is accepted, what is refused, and what is left on disk."""

import json
import logging
import re

import pytest

from ats_jax.checkpoint import workdir
from ats_jax.config import Config, base_config, from_config_dict
from ats_jax.config.identity import RunIdentity
from ats_jax.config.names import to_dict


def claim(folder, cfg):
  """Take a workdir and give it back, as a run does."""
  with workdir.claim(folder, cfg) as run:
    return run


def config(**changes) -> Config:
  base = base_config()
  base.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
  return from_config_dict(base)


@pytest.fixture
def run(tmp_path):
  """A workdir with a config and a checkpoint."""
  claim(tmp_path / "run", config())
  (tmp_path / "run" / "checkpoints" / "100").mkdir(parents=True)
  return tmp_path / "run"


def test_new_folder_gets_the_config(tmp_path):
  cfg = config(model__num_layers=3, seed=7)
  claim(tmp_path / "a" / "b", cfg)
  assert workdir.load_config(tmp_path / "a" / "b") == cfg
  assert json.loads((tmp_path / "a" / "b" / "config.json").read_text()) == {
    "format": workdir.FORMAT,
    **json.loads(json.dumps(to_dict(cfg))),
  }
  assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == {"config.json", "run_id", ".lock"}


def test_a_config_of_an_earlier_format_is_refused_in_one_line(tmp_path):
  claim(tmp_path, config())
  values = json.loads((tmp_path / "config.json").read_text())
  del values["format"]
  workdir.write_json(tmp_path / "config.json", values | {"precision": {"mu_dtype": "float32"}})
  for use in (workdir.load_config, lambda folder: claim(folder, config())):
    with pytest.raises(ValueError, match=r"json is of format 1, .* reads format 3") as error:
      use(tmp_path)
    assert "\n" not in str(error.value) and "another --workdir" in str(error.value)


def test_a_setting_that_was_removed_does_no_harm_where_it_was_not_used(run):
  values = json.loads((run / "config.json").read_text())
  for section, removed in workdir.REMOVED.items():
    values[section] |= removed
  workdir.write_json(run / "config.json", values)
  assert workdir.load_config(run) == config()
  assert "mesh.context_ring" not in workdir.stored_settings(run)
  claim(run, config())
  assert "context_ring" not in (run / "config.json").read_text()
  values["mesh"]["context_ring"] = True
  workdir.write_json(run / "config.json", values)
  for use in (workdir.load_config, workdir.stored_settings, lambda folder: claim(folder, config())):
    said = r"config.json has mesh.context_ring=true, a setting that was removed.* write false there"
    with pytest.raises(ValueError, match=said) as error:
      use(run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kept", ["allgather", "hierarchical"])
def test_a_kind_that_was_removed_is_refused_in_one_line_and_others_are_read(run, kept):
  values = json.loads((run / "config.json").read_text())
  values["moe"] |= {"num_experts": 4, "exchange": {"name": "bins", "factor": 1.25}}
  workdir.write_json(run / "config.json", values)
  for use in (workdir.load_config, workdir.stored_settings, lambda folder: claim(folder, config())):
    said = r'config.json has moe.exchange.name="bins", a kind that was removed.* write "allgather"'
    with pytest.raises(ValueError, match=said) as error:
      use(run)
    assert "\n" not in str(error.value)
  values["moe"]["exchange"]["name"] = kept
  workdir.write_json(run / "config.json", values)
  exchange = workdir.load_config(run).moe.exchange
  assert (exchange.name, exchange.factor) == (kept, 1.25)


def test_free_settings_may_change_and_are_logged(run, caplog):
  cfg = config(num_steps=800, log__every_steps=3)
  with caplog.at_level(logging.INFO, logger="absl"):
    claim(run, config())
    claim(run, cfg)
  assert [r.getMessage() for r in caplog.records] == [
    "changed since the last start: num_steps: 400 -> 800",
    "changed since the last start: log.every_steps: 10 -> 3",
  ]
  assert workdir.load_config(run) == cfg


def test_a_start_that_saved_nothing_binds_nobody(tmp_path, caplog):
  claim(tmp_path, config())
  with caplog.at_level(logging.INFO, logger="absl"):
    claim(tmp_path, config(model__num_layers=2, num_steps=800))
  assert [r.getMessage() for r in caplog.records] == [
    "changed since the last start, which saved nothing: num_steps, model.num_layers"
  ]
  assert workdir.load_config(tmp_path).model.num_layers == 2


def test_other_settings_are_shown_and_refused(run):
  before = (run / "config.json").read_text()
  with pytest.raises(ValueError) as error:
    claim(run, config(model__num_layers=2, data__tokenizer="bytes", num_steps=800))
  assert str(error.value) == (
    f"{run} holds a run with other settings:\n  model.num_layers: 4 -> 2\n"
    "  data.tokenizer: 'bpe' -> 'bytes'\n"
    "Use another --workdir for the new settings, or the old settings to go on."
  )
  assert (run / "config.json").read_text() == before


@pytest.mark.parametrize("name", ["100", "100.damaged"])
def test_settings_are_fixed_from_the_first_checkpoint_on(tmp_path, name):
  """A first start that was refused, say for its data, may be mended in the same workdir."""
  cfg = config(model__num_layers=2)
  claim(tmp_path, config())
  (tmp_path / "checkpoints" / "unfinished" / "1.1").mkdir(parents=True)
  claim(tmp_path, cfg)
  assert workdir.load_config(tmp_path) == cfg
  (tmp_path / "checkpoints" / name).mkdir()
  with pytest.raises(ValueError, match=r"model\.num_layers: 2 -> 4"):
    claim(tmp_path, config())


def test_a_setting_that_the_older_version_did_not_have_counts_as_its_default(run):
  path = run / "config.json"
  old = json.loads(path.read_text())
  del old["optimizer"]["ema_decay"], old["mesh"]
  path.write_text(json.dumps(old))
  claim(run, config())
  with pytest.raises(ValueError, match=r"optimizer\.ema_decay: 0\.0 -> 0\.5"):
    claim(run, config(optimizer__ema_decay=0.5))


def broken_file(run, name, contents, says):
  """A file of a run is refused whenever it is read, for each of these contents."""
  read = {"config.json": workdir.load_config, "run_id": workdir.load_identity}[name]
  for content in contents:
    (run / name).write_bytes(content)
    for use in (lambda: claim(run, config()), lambda: read(run)):
      with pytest.raises(ValueError, match=says):
        use()


def test_a_config_that_is_broken_or_missing(run):
  says = rf"{run}/config\.json cannot be read: .*Restore it"
  broken_file(run, "config.json", (b"", b'{"seed": ', b"\xff", b"[]", b"null"), says)
  (run / "config.json").unlink()
  with pytest.raises(ValueError, match=r"holds checkpoints but no config\.json"):
    claim(run, config())


def test_a_run_id_that_is_broken_or_missing(run):
  broken = (b"", b"0123456789abcde\n", b"0123456789abcdeg\n", b"\xff")
  broken_file(run, "run_id", broken, r"run_id holds '.*not the 16 hexadecimal digits")
  (run / "run_id").unlink()
  for use in (lambda: claim(run, config()), lambda: workdir.load_identity(run)):
    with pytest.raises(ValueError, match=r"holds no run_id, .*manifest\.json of each checkpoint"):
      use()
  assert not (run / "run_id").exists()


def test_folders_that_hold_no_run_and_cannot(tmp_path):
  with pytest.raises(ValueError, match=rf"{tmp_path} holds no run \(config\.json is missing\)"):
    workdir.load_config(tmp_path)
  (tmp_path / "file").write_text("x")
  with pytest.raises(ValueError, match=r"file cannot be used: it is a file\. Choose another"):
    claim(tmp_path / "file", config())
  with pytest.raises(ValueError, match="Not a directory"):
    claim(tmp_path / "file" / "run", config())
  folder = tmp_path / ("x" * 256)
  with pytest.raises(ValueError, match=r"cannot be used: .*File name too long.* Choose another"):
    claim(folder, config())
  with pytest.raises(ValueError, match=r"holds no run"):
    workdir.load_config(folder)


def test_a_store_that_refuses_is_said_on_one_line(bucket):
  def forbid(operation, name):
    raise OSError("Forbidden: b/bucket/o\nno entry for you.")

  bucket.before = staticmethod(forbid)
  with pytest.raises(ValueError) as error:
    claim("gs://bucket/run", config())
  assert str(error.value) == (
    "workdir gs://bucket/run cannot be used: OSError: Forbidden: b/bucket/o no entry for you. "
    "Choose another --workdir."
  )


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
  path = tmp_path / "x.json"
  workdir.write_json(path, {"a": 1})
  with pytest.raises(TypeError):
    workdir.write_json(path, {"a": object()})
  assert json.loads(path.read_text()) == {"a": 1}
  workdir.write_json(path, {"a": 2})
  assert json.loads(path.read_text()) == {"a": 2}
  assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_two_processes_cannot_train_in_one_workdir(tmp_path):
  with workdir.claim(tmp_path, config()):
    with pytest.raises(ValueError, match="another process trains in"):
      claim(tmp_path, config())
    before = (tmp_path / "config.json").read_bytes()
  claim(tmp_path, config())  # the first one ended
  assert (tmp_path / "config.json").read_bytes() == before


def test_a_refused_claim_keeps_nobody_out(tmp_path):
  claim(tmp_path, config())
  (tmp_path / "checkpoints" / "5").mkdir(parents=True)
  with pytest.raises(ValueError, match="other settings"):
    claim(tmp_path, config(seed=7))
  claim(tmp_path, config())


def test_a_run_is_the_same_at_each_claim(run):
  first = claim(run, config())
  assert re.fullmatch("[0-9a-f]{16}", first.run)
  assert claim(run, config(num_steps=800, checkpoint__keep=9)) == first  # these may change
  assert workdir.load_identity(run) == first


def test_runs_differ(tmp_path):
  one, other = claim(tmp_path / "one", config()), claim(tmp_path / "other", config())
  assert one.run != other.run and one.settings == other.settings
  seven = claim(tmp_path / "one", config(seed=7))  # no checkpoint yet
  assert seven.run == one.run and seven.settings != one.settings


@pytest.mark.parametrize(
  ("wanted", "saved", "is_same"),
  [
    ("2-a", "2-a", True),
    ("2-a", "2-b", False),
    ("2-a", "b", True),  # of a version in which fewer settings could change: not comparable
    ("", "2-b", True),
    ("2-a", None, True),
  ],
)
def test_settings_are_compared_with_those_of_the_same_selection(wanted, saved, is_same):
  assert RunIdentity("one", wanted).has({"run": "one", "settings": saved}) == is_same
  assert not RunIdentity("one", wanted).has({"run": "two", "settings": saved})
  assert not RunIdentity("one", wanted).has({})


def test_text_may_have_another_path(run):
  before = claim(run, config())
  assert (
    claim(run, config(data__paths=("/elsewhere/text",), data__validation_paths=("v",))) == before
  )


def test_a_setting_at_its_default_and_a_whole_number_change_no_hash(tmp_path):
  default = claim(tmp_path, config())
  assert claim(tmp_path, config(optimizer__eps=config().optimizer.eps)) == default
  whole = to_dict(config()) | {"optimizer": to_dict(config().optimizer) | {"learning_rate": 1}}
  assert claim(tmp_path, from_config_dict(whole)) == claim(
    tmp_path, config(optimizer__learning_rate=1.0)
  )
