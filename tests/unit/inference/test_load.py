import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys

import jax
import pytest
from commands import REPOSITORY
from helpers import tiny_config
from xla_flags import QUICK

from ats_jax.checkpoint import CheckpointError, integrity, workdir
from ats_jax.cluster import runtime
from ats_jax.config import base_config, from_config_dict
from ats_jax.config.schema import SampleConfig
from ats_jax.config.tree import edited
from ats_jax.inference import load
from ats_jax.inference.begin import begun
from ats_jax.inference.engine.compiled import compiled
from ats_jax.inference.engine.options import Options
from ats_jax.inference.load import fit_devices, load_run
from ats_jax.train.loop import train


def trained_on(data: int, fsdp: int, tensor: int, batch_size: int, accum_steps: int):
  config = base_config()
  config.mesh.update(data=data, fsdp=fsdp, tensor=tensor)
  config.data.batch_size = batch_size
  config.step.accum_steps = accum_steps
  return from_config_dict(config)


@pytest.mark.parametrize(
  ("trained", "devices", "fsdp", "tensor", "batch_size"),
  [
    ((1, 8, 1), 1, 1, 1, 8),
    ((2, 2, 2), 1, 1, 1, 8),
    ((2, 2, 2), 8, 2, 2, 8),
    ((1, 8, 1), 3, 1, 1, 9),
    ((1, 4, 2), 6, 1, 2, 9),
    ((1, 1, 4), 16, 1, 4, 8),
  ],
)
def test_any_run_fits_any_number_of_devices(trained, devices, fsdp, tensor, batch_size):
  cfg = trained_on(*trained, batch_size=16, accum_steps=2)
  fitted = fit_devices(cfg, devices)
  assert fitted.mesh == dataclasses.replace(cfg.mesh, data=-1, fsdp=fsdp, tensor=tensor)
  assert (fitted.data.batch_size, fitted.step.accum_steps) == (batch_size, 1)
  assert devices % (fsdp * tensor) == 0
  assert fitted.data.batch_size % (devices // tensor) == 0


def test_hosts_are_counted_anew():
  config = base_config()
  config.moe.update(num_experts=8, exchange={"name": "hierarchical", "hosts": 4})
  config.mesh.expert = 8
  fitted = fit_devices(from_config_dict(config), 2)
  assert (fitted.mesh.expert, fitted.moe.exchange.hosts) == (2, 0)


def one_step(tmp_path, name, changes):
  """Train a step in a new workdir."""
  (tmp_path / "text.txt").write_text("alpha beta gamma " * 300)
  settings = {
    "num_steps": 1,
    "model.vocab_size": 384,
    "data.paths": (str(tmp_path / "text.txt"),),
    "data.validation_fraction": 0.0,
    "log.progress": False,
    "sample.max_tokens": 0,
  }
  train(tiny_config(settings | changes), tmp_path / name)
  return tmp_path / name


@pytest.fixture
def trained(tmp_path):
  """The workdir of a run of one step."""
  yield one_step(tmp_path, "run", {})
  jax.config.update("jax_enable_compilation_cache", True)  # `train` turned it off for its process


def prepare(folder, of_the_config, of_the_checkpoint):
  """Give settings to a workdir, in its config and as what an orchestrator would have changed."""
  config = edited(json.loads((folder / workdir.CONFIG).read_text()))
  config.update_from_flattened_dict(of_the_config)
  workdir.write_json(folder / workdir.CONFIG, config.to_dict())
  checkpoint = folder / workdir.CHECKPOINTS / "1"
  extra = json.loads((checkpoint / "extra.json").read_text())
  workdir.write_json(checkpoint / "extra.json", extra | {"settings": of_the_checkpoint})
  manifest = integrity.read_manifest(checkpoint)
  (checkpoint / integrity.MANIFEST).unlink()
  integrity.seal(checkpoint, {k: v for k, v in manifest.items() if k not in ("version", "files")})


def test_neither_a_workdir_nor_a_checkpoint_names_a_cache_or_an_option(trained, tmp_path):
  theirs, dump = tmp_path / "theirs", tmp_path / "dump"
  of_the_config = {
    "compilation_cache": str(theirs),
    "data.cache_dir": str(theirs),
    "step.compiler_options": {"xla_dump_to": str(dump)},
  }
  of_the_checkpoint = {"compilation_cache": ["auto", str(theirs)], "data.cache_dir": ["", "x"]}
  for changes in ((of_the_config, {}), ({"compilation_cache": "auto"}, of_the_checkpoint)):
    folder = shutil.copytree(trained, tmp_path / f"changed{len(changes[1])}")
    prepare(folder, *changes)
    with load_run(folder) as run:
      assert jax.config.jax_enable_compilation_cache
      assert jax.config.jax_compilation_cache_dir == str(runtime.cache_folder(base()))
      assert (run.program.cfg.data.cache_dir, run.program.options) == ("", {})
  assert not theirs.exists() and not dump.exists()
  with load_run(trained) as run:  # without a cache
    assert run.program.cfg.compilation_cache == "off"
    assert not jax.config.jax_enable_compilation_cache


def test_a_checkpoint_is_used_with_the_settings_that_it_was_made_with(trained, monkeypatch):
  # Those of the newest one, which was then damaged, or deleted by the training.
  rate = [tiny_config().optimizer.learning_rate, 0.5]
  extra = {"settings": {"optimizer.learning_rate": rate}}
  monkeypatch.setattr(load, "known_of", lambda *_: (2, extra))
  with load_run(trained) as run:
    assert (run.step, run.program.cfg.optimizer.learning_rate) == (1, rate[0])


def test_a_run_is_loaded_without_the_file_that_its_tokenizer_came_from(trained, tmp_path):
  file = str(shutil.copy(trained / workdir.TOKENIZER, tmp_path / "own.json"))
  folder = one_step(tmp_path, "other", {"data.tokenizer": file})
  (tmp_path / "own.json").unlink()
  with load_run(folder) as run:
    assert run.tokenizer.encode("a") == [97]


def base():
  """A config whose caches are where those of the user are."""
  return from_config_dict(base_config())


def test_a_run_without_a_sample_of_its_own_generates_as_by_default(trained):
  with load_run(trained, devices=1) as run:
    assert run.program.cfg.sample.max_tokens == 0
    assert run.sampling().max_tokens == SampleConfig().max_tokens
    assert run.sampling(max_tokens=9).max_tokens == 9


def test_engines_of_a_run_do_not_share_what_they_keep(trained):
  drawing = {"prompt": "seven", "max_tokens": 9, "temperature": 0.0}
  with load_run(trained, devices=1) as run:
    alone = "".join(run.generate(0, **drawing))
    both = [run.generate(0, **drawing), run.generate(0, **drawing | {"prompt": "eight"})]
    pieces = ["".join(of) for of in zip(*itertools.zip_longest(*both, fillvalue=""), strict=True)]
    assert pieces[0] == alone == "".join(run.generate(0, **drawing))
    assert "".join(run.generate(0, **drawing | {"prompt": "eight"})) == pieces[1]
  assert jax.device_count() > 1
  wrong = pytest.raises(ValueError, match=r"runs on 1 device\(s\), and this run was loaded")
  with load_run(trained) as run, wrong:
    run.engine(1)


def test_a_run_guesses_for_itself(trained):
  drawing, texts = {"prompt": "seven", "max_tokens": 9, "temperature": 0.0}, []
  for draft in ("", str(trained)):
    options = Options(speculate=3, draft=draft)
    with load_run(trained, devices=1, options=options) as run:
      texts.append(["".join(run.generate(0, **drawing)) for _ in range(2)])
  assert texts[0] == texts[1]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"data.tokenizer": "bpe", "data.bpe_vocab_size": 300}, "its tokenizer is not that of"),
    ({"mod.routing": "static"}, r"skips tokens in some layers \(mod.routing\), so it cannot guess"),
  ],
)
def test_runs_that_cannot_guess_are_refused(trained, tmp_path, changes, message):
  options = Options(speculate=3, draft=str(one_step(tmp_path, "other", changes)))
  with pytest.raises(ValueError, match=message), load_run(trained, devices=1, options=options):
    pass


def test_an_engine_on_several_devices(trained):
  drawing, texts = {"prompt": "seven", "max_tokens": 9, "temperature": 0.0}, []
  for options in (Options(), Options(tensor=2)):
    with load_run(trained, devices=1, options=options) as run:
      assert jax.sharding.get_mesh().size == options.devices
      texts.append("".join(run.generate(0, **drawing)))
  assert texts[0] == texts[1]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"tensor": 16}, "on tensor=16 x expert=1 devices, and there are 8"),
    ({"expert": 2}, "this model has no experts to share"),
    ({"tensor": 3}, "mesh.tensor=3 does not divide model.num_heads=4"),
  ],
)
def test_devices_that_cannot_share_a_model_are_refused(trained, options, message):
  with pytest.raises(ValueError, match=message), load_run(trained, options=Options(**options)):
    pass


def test_guesses_change_no_text_and_are_loaded_when_asked_for(trained):
  drawing = {"prompt": "seven seven seven", "max_tokens": 20}
  texts = []
  for options in (Options(), Options(speculate=3)):
    with load_run(trained, devices=1, options=options) as run:
      engine = run.engine(1)
      assert (engine._runner._programs.verify is not None) == (options.speculate > 0)
      del engine
      texts.append("".join(run.generate(4, **drawing)))
  assert texts[0] == texts[1]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"pages": "int4"}, "pages='int4': expected 'int8', 'fp8', or '' for the compute dtype"),
    ({"speculate": -1}, "speculate=-1 is not a whole number from 0 to 16"),
    ({"speculate": 17}, "speculate=17 is not"),
    ({"speculate": True}, "speculate=True is not"),
    ({"draft": "runs/small"}, "draft=runs/small: how many tokens it guesses is missing"),
    ({"draft": "a", "speculate": 2, "tensor": 2}, "draft=a: it guesses on one device"),
    ({"tensor": 0}, "tensor=0 is not a whole number of devices, from 1"),
  ],
)
def test_engines_that_there_are_not_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    Options(**options)


@pytest.mark.parametrize("options", [{}, {"speculate": 3}, {"speculate": 3, "draft": True}])
def test_the_first_tokens_need_no_program_that_was_compiled_meanwhile(
  trained, options, compiled_names
):
  options = Options(**options | ({"draft": str(trained)} if "draft" in options else {}))
  given = {"prompt": "seven", "max_tokens": 4, "temperature": 0.0}
  with load_run(trained, devices=1, options=options) as run:
    wanted = "".join(run.generate(0, **given))
  compiled.cache_clear()
  compiled_names.clear()
  meanwhile = lambda run: run.compile(**given)
  with load_run(trained, devices=1, options=options, meanwhile=meanwhile) as run:
    of_step = "jit(verify)" if options.draft else "jit(decode)"
    assert {"jit(chunk)", of_step} <= set(compiled_names)
    compiled_names.clear()
    assert "".join(run.generate(0, **given)) == wanted
  assert not compiled_names


def test_an_error_meanwhile_is_raised_unless_the_checkpoint_is_damaged(trained):
  def meanwhile(run):
    assert run.step == 1 and isinstance(jax.tree.leaves(run.model)[0], jax.ShapeDtypeStruct)
    raise ValueError("no such prompt")

  with pytest.raises(ValueError, match="no such prompt"):
    load_run(trained, meanwhile=meanwhile).__enter__()
  damage(trained)
  with pytest.raises(CheckpointError, match="no intact checkpoint"):
    load_run(trained, meanwhile=meanwhile).__enter__()


# Sends the process a Ctrl-C when it is about to read arrays.
INTERRUPTED = """
import signal, sys
from ats_jax import verbs
from ats_jax.checkpoint import reader
reader._read_arrays = lambda *_: signal.raise_signal(signal.SIGINT)
sys.exit(verbs.main())
"""


def damage(folder):
  """Cut the end of the largest file of a checkpoint."""
  state = folder / workdir.CHECKPOINTS / "1" / "state"
  data = max((p for p in state.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  data.write_bytes(data.read_bytes()[:-1])


def test_a_run_that_was_begun_is_verified_as_ever(trained):
  with begun(trained, "latest"), load_run(trained) as run:
    assert run.step == 1
  damage(trained)
  with begun(trained, "latest"), pytest.raises(CheckpointError, match="no intact checkpoint"):
    load_run(trained).__enter__()
  with pytest.raises(CheckpointError, match="no checkpoint 7"), begun(trained, "7"):
    load_run(trained, "7").__enter__()
  (trained / workdir.CONFIG).unlink()
  with pytest.raises(ValueError, match="holds no run"), begun(trained, "latest"):
    pass


def test_a_ctrl_c_while_a_run_is_loaded_leaves_no_traceback(trained):
  done = subprocess.run(
    [sys.executable, "-c", INTERRUPTED, "generate", f"--workdir={trained}", "--prompt=a"],
    cwd=REPOSITORY, env={**os.environ, "XLA_FLAGS": QUICK}, capture_output=True, text=True,
    check=False,
  )  # fmt: skip
  assert (done.returncode, done.stdout) == (130, ""), done.stderr
  assert done.stderr.splitlines()[-1] == "interrupted" and "Traceback" not in done.stderr
