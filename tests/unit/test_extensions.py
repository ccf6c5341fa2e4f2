"""Parts of a user's own file, named in the config: through `train` each, and what can go wrong."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import CACHED, tiny_config

from ats_jax import extensions
from ats_jax.config.build import with_settings
from ats_jax.config.extend import load_extensions
from ats_jax.config.schema.setting import Table
from ats_jax.data.sources import open_data
from ats_jax.data.splits import open_datasets
from ats_jax.inference.load import load_run
from ats_jax.metrics.rows import read_jsonl
from ats_jax.train.loop import train

SINK = """
from ats_jax.extensions import writers
from ats_jax.metrics.writer import MetricWriter

@writers.register("mine")
class Mine(MetricWriter):
  def __init__(self, opening):
    self.file = open(opening.folder / "mine.txt", "a")
    self.file.write(f"run {opening.run} from {opening.last_step} in {opening.project}\\n")

  def write_scalars(self, step, scalars):
    self.file.write(f"{step} {sorted(scalars)[0]}\\n")

  def write_hparams(self, hparams):
    self.file.write(f"layers {hparams['model.num_layers']}\\n")

  def write_histograms(self, step, arrays, num_buckets=None):
    self.file.write(f"{step} {list(arrays)}\\n")

  def flush(self):
    self.file.flush()

  def close(self):
    self.file.close()
"""


@pytest.fixture(autouse=True)
def nothing_stays():
  """Each test begins without extensions and leaves none."""
  yield
  for registry in extensions.ALL:
    for owner in {registry.owner(name) for name in registry} - {""}:
      registry.forget(owner)
  extensions.loaded.clear()


@pytest.fixture
def config(tmp_path):
  """A function that gives the config of a run with an extension of a source."""
  text = tmp_path / "text.txt"
  text.write_text("the cat sat on the mat, and the dog on the log. " * 60)

  def make(source, changes=(), name="mine.py"):
    (tmp_path / name).write_text(source)
    return tiny_config(
      {
        **CACHED,
        "num_steps": 4,
        "extensions": (str(tmp_path / name),),
        "model.vocab_size": 384,
        "data.paths": (str(text),),
        "data.validation_fraction": 0.0,
        "data.cache_dir": str(tmp_path / "cache"),
        "log.writers": ("jsonl",),
        "log.every_steps": 1,
        "log.progress": False,
        "sample.max_tokens": 0,
        **dict(changes),
      }
    )

  return make


def rows(folder):
  return [row for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]


OPTIMIZER = """
import dataclasses
import optax
from ats_jax.config.schema.optimizer import OptimizerConfig
from ats_jax.config.schema.setting import setting
from ats_jax.extensions import optimizers, schedules
from ats_jax.step.optimizers.base import Optimizer

@schedules.register("halved")
def halved(progress, cfg, xp):
  return xp.where(progress < 0.5, 1.0, 0.5)

@dataclasses.dataclass(frozen=True)
class Sign(OptimizerConfig):
  momentum: float = setting(0.9, "decay of the average whose sign is taken", low=0.0, high=1.0)
  b2: str = setting("0.95", "a word here, a number in adamw")

@optimizers.register("sign", settings=Sign)
def sign(cfg, platform, kernels):
  return Optimizer(optax.scale_by_lion(cfg.optimizer.momentum, float(cfg.optimizer.b2)), platform)
"""


def test_a_metric_writer_a_schedule_and_an_optimizer(config, tmp_path, caplog):
  """In a run that goes on, with a changed file; no command runs the file of a workdir."""
  caplog.set_level(logging.INFO)
  run, own = tmp_path / "run", tmp_path / "run" / "mine.txt"
  changes = {"log.writers": ("jsonl", "mine"), "log.project": "cats"}
  changes |= {"optimizer.schedule": "halved", "optimizer.name": "sign", "optimizer.momentum": 0.95}
  cfg = config(SINK + OPTIMIZER, changes)
  state = train(cfg, run)
  lines = own.read_text().splitlines()
  number = (run / "run_id").read_text().strip()
  assert lines[:2] == [f"run {number} from -1 in cats", "layers 2"]
  assert [line for line in lines if "memory" in line] == [
    f"{step} memory/host_rss_gib" for step in (1, 2, 3, 4)
  ]
  (kept,) = json.loads((run / "config.json").read_text())["extensions"]
  name, _, digest = kept.partition("#")
  assert name == str(tmp_path / "mine.py") and len(digest) == 16

  rates = [row["train/learning_rate"] for row in rows(run)]
  np.testing.assert_allclose(rates, [1e-2, 1e-2, 5e-3, 5e-3])
  assert "ScaleByLionState" in str(type(state.opt_state))
  # Every weight moves by the learning rate, as only the sign of Lion's direction counts: what an
  # optimizer returns is all that is done, and this one leaves clipping and decay out.
  moved = [row["train/update_norm"] / row["train/learning_rate"] for row in rows(run)]
  np.testing.assert_allclose(moved, moved[0], rtol=1e-3)

  (tmp_path / "mine.py").write_text(SINK.replace('f"layers', 'f"depth') + OPTIMIZER)
  train(with_settings(cfg, {"num_steps": 6}), run)
  assert f"changed since the last start: extensions: {(kept,)!r} -> ('{name}#" in caplog.text
  again = own.read_text().splitlines()[len(lines) :]
  assert again[:2] == [f"run {number} from 4 in cats", "depth 2"]
  assert "5 memory/host_rss_gib" in again

  extensions.loaded.clear()
  owner = extensions.writers.owner("mine")
  for registry in extensions.ALL:
    registry.forget(owner)
  (tmp_path / "mine.py").write_text("raise RuntimeError('was run')")
  with load_run(run) as loaded:
    assert loaded.step == 6 and loaded.program.cfg.extensions == ()


@pytest.mark.parametrize("made", ["3", "optax.sgd(1.0)"])
def test_an_optimizer_that_is_none(config, tmp_path, made):
  source = f"""
import optax
from ats_jax.extensions import optimizers
optimizers.register("none")(lambda cfg, platform, kernels: {made})
"""
  says = r"optimizer.name=none made .*: expected an ats_jax.*docs/gu"
  with pytest.raises(ValueError, match=says):
    train(config(source, {"optimizer.name": "none"}), tmp_path / "run")


def test_a_data_format(config, tmp_path, caplog):
  source = """
from ats_jax.extensions import formats

@formats.register(".tabs")
def columns(path, text_field, report):
  with open(path) as lines:
    for number, line in enumerate(lines, 1):
      if line.count("\\t") != 1:
        report.bad("no two columns", f"{path}:{number}", "expected two columns")
      else:
        yield line.split("\\t")[1].strip()
"""
  text = "".join(f"{i}\tthe cat number {i} sat on the mat\n" for i in range(40))
  caplog.set_level(logging.INFO)
  (tmp_path / "cats.tabs").write_text(f"broken\n{text}")
  changes = {"data.paths": (str(tmp_path / "cats.tabs"),), "data.tokenizer": "bytes"}
  # Another reader of the same file makes another corpus.
  for reader in (source, source.replace("[1].strip", "[1].upper")):
    cfg = load_extensions(config(reader, changes))
    open_datasets(cfg.data, cfg.seed)
  assert "Malformed input was left out: 1 no two columns" in caplog.text
  assert "40 documents" in caplog.text
  assert sum(p.is_dir() for p in (tmp_path / "cache").glob("corpus-*")) == 2


def test_an_order_of_rows(config, tmp_path):
  source = """
import dataclasses
import numpy as np
from ats_jax.config.schema.row_order import RowOrderConfig
from ats_jax.config.schema.setting import setting
from ats_jax.data.rows.buckets import PartedOrder
from ats_jax.data.rows.contract import Part, RowOrder
from ats_jax.extensions import orders

@dataclasses.dataclass(frozen=True)
class InFiles(RowOrderConfig):
  parts: int = setting(3, "parts in the order of the files", low=2)

@orders.register("in_files", settings=InFiles)
class InFilesOrder(PartedOrder):
  def divide(self, cfg, documents):
    groups = np.array_split(documents.indices, cfg.order.parts)
    return [Part(f"part {n}", cfg.seq_len, group) for n, group in enumerate(groups)]

@orders.register("half")
class Half(RowOrder):
  def rows(self, cfg, documents, seed):
    return documents.pack(cfg, seed, documents.indices[::2], "train")

orders.register("no_order")(lambda: 3)
orders.register("instance")(Half())

@dataclasses.dataclass(frozen=True)
class OfSources(RowOrderConfig):
  def check(self, cfg):
    pass  # it goes with every source

orders.register("of_sources", settings=OfSources)(Half)
"""
  text = "".join(f"{json.dumps({'text': f'the cat number {i:03} sat'})}\n" for i in range(90))
  (tmp_path / "cats.jsonl").write_text(text)
  common = {"data.paths": (str(tmp_path / "cats.jsonl"),)}

  def opened(name):
    cfg = load_extensions(config(source, common | {"data.order": name}))
    return open_data(cfg.data, cfg.seed)[0]

  ordered = opened("in_files")
  assert list(ordered.info.parts) == ["part 0", "part 1", "part 2"]
  rows_of = [part.info.packed.documents for part in ordered.info.parts.values()]
  np.testing.assert_array_equal(np.concatenate(rows_of), np.arange(90))
  parts = [ordered.place(row)[0] for row in range(ordered.info.num_rows)]
  assert parts == sorted(parts) and set(parts) == {0, 1, 2}
  assert opened("half").info.num_documents == 45
  for name in ("no_order", "instance"):
    with pytest.raises(ValueError, match=rf"data.order={name}: .* Register a class that derives"):
      opened(name)
  table = Table(a=("a.txt",))
  sources = {"data.paths": (), "data.sources": table, "data.order": "of_sources"}
  cfg = load_extensions(config(source, sources))  # by its rules, not by those of other orders
  assert type(cfg.data.order).__name__ == "OfSources"
  cfg = config(source, common | {"data.order": "in_files"})
  train(cfg, tmp_path / "run")
  assert "part 2" in (tmp_path / "run" / "metadata.json").read_text()
  message = r"data.order=in_files orders the documents of one text"
  with pytest.raises(ValueError, match=message):
    with_settings(load_extensions(cfg), {"data.paths": (), "data.sources": {"a": ("a.txt",)}})


def test_the_examples_of_the_guide(tmp_path):
  """A run with every part that they register."""
  guide = Path(__file__).parents[2] / "docs" / "guides" / "extending.md"
  examples = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
  (tmp_path / "parts.py").write_text("\n".join(examples))
  settings = CACHED | {
    "num_steps": 3,
    "extensions": (f"{tmp_path}/parts.py",),
    "model.vocab_size": 384,
    "data.validation_fraction": 0.0,
    "data.cache_dir": f"{tmp_path}/cache",
    "log.every_steps": 1,
    "log.progress": False,
    "sample.max_tokens": 0,
    "moe.num_experts": 4,
  }
  load_extensions(tiny_config(settings))
  named = {
    setting: [name for name in registry if registry.owner(name)]
    for setting, registry in {
      "optimizer.name": extensions.optimizers,
      "optimizer.schedule": extensions.schedules,
      "data.order": extensions.orders,
      "step.loss.name": extensions.losses,
      "moe.router": extensions.routers,
    }.items()
  }
  writers, suffixes = (
    [name for name in registry if registry.owner(name)]
    for registry in (extensions.writers, extensions.formats)
  )
  assert any(named.values()) and writers
  text = tmp_path / f"cats{next(iter(suffixes), '.txt')}"
  text.write_text("".join(f"{i}\tthe cat number {i} sat on the mat\n" for i in range(40)))
  settings |= {setting: names[0] for setting, names in named.items() if names}
  settings |= {"data.paths": (str(text),), "log.writers": ("jsonl", *writers)}
  train(tiny_config(settings), tmp_path / "run")
  assert len(rows(tmp_path / "run")) == 3


# Mistakes.


@pytest.mark.parametrize(
  ("source", "words"),
  [
    ("import nosuchmodule", r"mine.py' cannot be loaded. .*mine.py:1: ModuleNotFoundError: No mod"),
    ("x = 1\ny = x +", r"mine.py:2: SyntaxError"),
    (
      SINK.replace('"mine"', '"jsonl"'),
      "metric writer 'jsonl' is there already, of ats_jax itself",
    ),
    (SINK + SINK, "metric writer 'mine' is there already, of .*mine.py#"),
    (SINK.replace('"mine"', '"my sink"'), "metric writer 'my sink': a name has no comma and no sp"),
    ("", "log.writers='mine' is unknown. Choose one of: console, jsonl, .*name the file that"),
    (SINK.replace('"mine"', '"mines"'), "log.writers='mine' is unknown.* Did you mean 'mines'?"),
  ],
)
def test_what_is_wrong_with_a_file_is_said(config, tmp_path, source, words):
  with pytest.raises(ValueError, match=f"(?s){words}"):
    train(config(source, {"log.writers": ("mine",)}), tmp_path / "run")
  assert not (tmp_path / "run").exists()
  assert "mine" not in extensions.writers  # nothing of a file that failed stays


def test_files_that_cannot_be_loaded(config, tmp_path):
  (tmp_path / "other.py").write_text(SINK)
  for files, says in (
    ((f"{tmp_path}/mine.py", f"{tmp_path}/other.py"), "'mine' is there already, of .*mine.py#"),
    (("nowhere.py",), r"extensions='nowhere.py' cannot be read: No such file"),
    (("nowhere",), r"extensions='nowhere' is neither a file that ends in .py"),
  ):
    with pytest.raises(ValueError, match=says):
      load_extensions(config(SINK, {"extensions": files}))


def test_a_module_that_can_be_imported(config, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  cfg = config(SINK, {"extensions": ("my_parts",), "log.writers": ("mine",)}, name="my_parts.py")
  (entry,) = load_extensions(cfg).extensions
  assert entry.startswith("my_parts#")
  assert "mine" in extensions.writers


def test_an_unknown_name_may_be_one_of_a_file_that_is_not_loaded_yet(config):
  assert config(SINK, {"optimizer.schedule": "of_mine"}).optimizer.schedule.name == "of_mine"
  with pytest.raises(ValueError, match=r"optimizer.schedule.name='of_mine' is unknown"):
    tiny_config({"optimizer.schedule": "of_mine"})


FIRST = """
import sys
from ats_jax import extensions
from ats_jax.config import base_config, from_config_dict
from_config_dict(base_config())
print(*(name for name in sys.modules if name.startswith("ats_jax.step")))
from ats_jax.config.extend import load_extensions
from ats_jax.config.schema import Config
load_extensions(Config(extensions=(sys.argv[1],)))
for registry in extensions.ALL:
  print(*{registry.owner(name).partition("#")[0] for name in registry})
"""


def test_what_is_built_in_belongs_to_no_file_that_is_loaded_first(tmp_path):
  """And a config is checked without the parts that it names."""
  (tmp_path / "mine.py").write_text(SINK)
  command = [sys.executable, "-c", FIRST, str(tmp_path / "mine.py")]
  result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
  imported, *owners = [set(line.split()) for line in result.stdout.splitlines()]
  assert not imported
  assert owners == [{str(tmp_path / "mine.py")}, *[set()] * (len(extensions.ALL) - 1)], (
    result.stderr
  )


def test_what_is_built_in_is_registered_alike():
  assert {"console", "jsonl", "csv", "tensorboard", "clu"} <= set(extensions.writers)
  assert {"cosine", "linear", "wsd", "constant", "rex", "one_cycle"} == set(extensions.schedules)
  assert {"adamw", "adamw8bit", "muon", "lion", "optax"} <= set(extensions.optimizers)
  assert ".jsonl" in extensions.formats
  assert list(extensions.orders) == ["shuffled", "buckets", "length", "difficulty"]
  for registry in (
    extensions.writers,
    extensions.schedules,
    extensions.optimizers,
    extensions.orders,
  ):
    assert all(callable(registry.find(name)) for name in registry)
