"""What a user can get wrong: the exit code, and a message that says what, where and what to do."""

import functools
import shutil
from pathlib import Path

import commands
import pytest
from commands import Result, called, forked, limit_file_size, train_flags

from ats_jax import api
from ats_jax.checkpoint import committed_steps
from ats_jax.exits import REFUSED


def assert_says(message: str, *parts: str) -> None:
  for part in parts:
    assert part in message, message


def says(result: Result, *parts: str) -> bool:
  """Whether a command was refused, without a traceback, by a message with all these parts."""
  refused = result.code == REFUSED and "Traceback" not in result.out + result.err
  return refused and all(part in result.err.partition("error: ")[2] for part in parts)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
  """A folder of files that are no good."""
  folder = tmp_path_factory.mktemp("inputs")
  (folder / "empty.txt").touch()
  (folder / "latin.txt").write_bytes("abc caf\xe9".encode("latin-1"))
  (folder / "short.txt").write_text("hi")
  (folder / "picture.jpg").write_bytes(b"\xff\xd8")
  (folder / "nothing").mkdir()
  (folder / "mixed").mkdir()
  lines = ['{"text": "%s"}' % ("good " * 20), '{"text": broken', '{"txt": "x"}', '{"text": 3}']
  (folder / "mixed" / "lines.jsonl").write_text("\n".join(lines))
  (folder / "mixed" / "latin.txt").write_bytes(b"ab\xff")
  (folder / "tokenizer.json").write_text('{"version": "1.0"}')
  (folder / "bad.py").write_text(
    "from ats_jax.config import base_config\n"
    "def get_config():\n  config = base_config()\n  config.model.num_layers = 'four'\n"
    "  return config\n"
  )
  (folder / "typo.py").write_text(
    "from ats_jax.config import base_config\n"
    "def get_config():\n  config = base_config()\n  config.model.num_layrs = 4\n"
    "  return config\n"
  )
  (folder / "name.py").write_text("def get_config():\n  return seed\n")
  (folder / "nothing.py").write_text("def get_config():\n  pass\n")
  (folder / "exit.py").write_text("import sys\nsys.exit(0)\n")
  return folder


# Settings -> parts of the message.
SETTINGS = {
  "missing file": (["data.paths={inputs}/no.txt"], "{inputs}/no.txt' does not exist"),
  "glob without a match": (["data.paths={inputs}/*.rs"], "{inputs}/*.rs' matches no file"),
  "empty file": (["data.paths={inputs}/empty.txt"], "1 empty", "Check data.paths"),
  "empty folder": (["data.paths={inputs}/nothing"], "no file that can be read", ".txt"),
  "unknown suffix": (["data.paths={inputs}/picture.jpg"], "picture.jpg' has a suffix", ".jsonl"),
  "not UTF-8": (["data.paths={inputs}/latin.txt"], "{inputs}/latin.txt: not UTF-8 at byte 7 (e9)"),
  "not UTF-8, strict": (
    ["data.paths={inputs}/latin.txt", "data.strict=True"],
    "{inputs}/latin.txt: not UTF-8 at byte 7 (e9). Mend it, or set data.strict=False",
  ),
  "broken JSON, strict": (
    ["data.paths={inputs}/mixed/lines.jsonl", "data.strict=True"],
    "{inputs}/mixed/lines.jsonl:2: broken JSON",
    "data.strict=False",
  ),
  "shorter than a row": (
    ["data.paths={inputs}/short.txt", "data.validation_fraction=0.0"],
    "has 3 tokens in 1 documents, less than one row of data.seq_len=32",
    "set data.seq_len to at most 3",
  ),
  "heads": (
    ["model.num_heads=3", "model.num_kv_heads=3"],
    "model.num_heads=3 does not divide model.d_model=32",
    "Change one",
  ),
  "kv heads": (
    ["model.num_heads=4", "model.num_kv_heads=3"],
    "model.num_kv_heads=3 does not divide model.num_heads=4",
    "use a divisor",
  ),
  "precision word": (
    ["precision.compute_dtype=float8"],
    "precision.compute_dtype='float8' is unknown",
    "float32, bfloat16",
  ),
  "accum": (["step.accum_steps=3"], "step.accum_steps=3 does not divide data.batch_size=8"),
  "out of range": (["model.num_layers=0"], "model.num_layers=0 is too small: at least 1"),
  "vocabulary": (
    ["model.vocab_size=100"],
    "model.vocab_size=100 is smaller than the tokenizer's 259 tokens",
    "Use at least 259, or 0",
  ),
  "no tokenizer": (
    ["data.tokenizer={inputs}/no.json"],
    "data.tokenizer='{inputs}/no.json' is neither 'bytes', 'bpe' nor an existing",
  ),
  "not a tokenizer": (
    ["data.tokenizer={inputs}/tokenizer.json"],
    "{inputs}/tokenizer.json' is not a tokenizer.json: it has no field 'model'",
  ),
  "extension": (["extensions=nowhere.py"], "extensions='nowhere.py' cannot be read: No such file"),
  "writer": (
    ["log.writers=console,jsonnl"],
    "log.writers='jsonnl' is unknown",
    "Did you mean 'jsonl'?",
  ),
  "cache file": (
    ["compilation_cache={inputs}/short.txt"],
    "compilation cache {inputs}/short.txt cannot be made: File exists",
    "compilation_cache to 'off'",
  ),
  "unknown key": (
    ["model.num_layrs=3"],
    "no such setting",
    "Did you mean --config.model.num_layers?",
  ),
  "unknown section": (["modle.num_layers=3"], "Did you mean --config.model.num_layers?"),
  "wrong type": (
    ["model.num_layers=abc"],
    "--config.model.num_layers=abc",
    "(int): decoder blocks",
    "range [1, 10000]",
  ),
  "not a number": (["optimizer.learning_rate=1e-3x"], "=1e-3x", "learning_rate (float): peak"),
  "too many experts": (
    ["moe.num_experts=4", "moe.top_k=5"],
    "moe.top_k=5 exceeds moe.num_experts=4",
    "lower top_k or add experts",
  ),
  "no capacity": (["mod.routing=learned", "mod.capacity=0.0"], "mod.capacity=0.0 is too small"),
  "skipping past the top": (
    ["mod.routing=learned", "mod.start_layer=90"],
    "mod.start_layer=90",
    "no range within model.num_layers=",
  ),
  "null experts that save nothing": (
    ["moe.num_experts=4", "moe.null_experts=2", "moe.dispatch=capacity"],
    "moe.null_experts=2 needs moe.dispatch=dropless",
  ),
  "not finite": (["optimizer.eps=inf"], "optimizer.eps=inf is not a finite number"),
  "more steps than are counted": (["num_steps=3000000000"], "num_steps=3000000000 is too large"),
  "not a truth value": (["data.strict=maybe"], "--config.data.strict=maybe", "data.strict (bool)"),
}


def test_settings_and_data(tiny, inputs, tmp_path):
  offenders = []
  for name, (settings, *parts) in SETTINGS.items():
    flags = train_flags(tmp_path / "run", *tiny, *(s.format(inputs=inputs) for s in settings))
    result = called("train", *flags)
    if result.out or not says(result, *(p.format(inputs=inputs) for p in parts)):
      offenders.append((name, result))
  assert not offenders


# Changes of a small model -> parts of the message, on 8 devices.
SMALL = {
  "model.num_layers": 1, "model.d_model": 32, "model.num_heads": 2, "model.num_kv_heads": 2,
  "model.d_ff": 32, "data.tokenizer": "bytes", "data.seq_len": 32, "data.batch_size": 8,
}  # fmt: skip
MESHES = {
  "too large": (
    {"mesh.data": 4, "mesh.fsdp": 4},
    "mesh 1x4x4x1x1x1 (stage, data, fsdp, expert, context, tensor) needs 16 devices, there are 8",
    "mesh.data=-1",
  ),
  "no divisor": (
    {"mesh.fsdp": 3, "model.d_model": 48, "model.vocab_size": 384},
    "mesh.fsdp=3 x mesh.expert=1 x mesh.context=1 x mesh.tensor=1 = 3 does not divide the 8",
  ),
  "batch": (
    {"data.batch_size": 12},
    "data.batch_size=12 / step.accum_steps=1 = 12 rows",
    "do not divide over mesh.data=8",
    "Use a multiple of 8",
  ),
  "micro-batch": ({"step.accum_steps": 2}, "= 4 rows a micro-batch", "Use a multiple of 16"),
  "heads": ({"mesh.tensor": 4}, "mesh.tensor=4 does not divide model.num_heads=2"),
  "experts": (
    {"mesh.expert": 4, "moe.num_experts": 6},
    "mesh.expert=4 does not divide moe.num_experts=6",
  ),
}


def test_mesh(text, tmp_path):
  """In this process, which has eight devices."""
  for changes, *parts in MESHES.values():
    with pytest.raises(ValueError) as error:
      api.train(api.config("debug", SMALL | {"data.paths": (str(text),)} | changes), tmp_path / "x")
    for part in parts:
      assert part in str(error.value)


# Module and flags -> parts of the message.
COMMANDS = {
  "variant": (
    "train --config=configs/debug.py:foo --workdir={run}",
    "configs/debug.py: unknown variant 'foo'",
    "Choose one of dense, moe, mod, hybrid, null.",
  ),
  "config does not exist": (
    "train --config=configs/no.py --workdir={run}",
    "--config=configs/no.py",
    "No such file or directory",
    f"seen from {commands.REPOSITORY}",
  ),
  "config is a folder": ("train --config=configs --workdir={run}", "configs is a folder"),
  "wrong type in a config": (
    "train --config={inputs}/bad.py --workdir={run}",
    "--config={inputs}/bad.py",
    "{inputs}/bad.py:4: TypeError: ",
    "num_layers",
    "four",
  ),
  "name not known in a config": (
    "train --config={inputs}/name.py --workdir={run}",
    "{inputs}/name.py:2: NameError: name 'seed' is not defined\n",
  ),
  "config that returns nothing": (
    "plan --config={inputs}/nothing.py",
    "{inputs}/nothing.py: get_config() returned None, not a ConfigDict",
    "`return config`",
  ),
  "config that exits": (
    "bench --config={inputs}/exit.py",
    "{inputs}/exit.py:2: SystemExit: 0\n",
  ),
  "no name of a config": ("train --config= --workdir={run}", "the name of the file is empty"),
  "unknown key in a config": (
    "train --config={inputs}/typo.py --workdir={run}",
    "unknown key model.num_layrs. Did you mean model.num_layers?",
  ),
  "no dashes": (
    "train --config=configs/debug.py --workdir={run} config.num_steps=3",
    "unexpected argument 'config.num_steps=3'",
    "--name=value",
  ),
  "explain": (
    "train --explain=model.num_layrs",
    "no setting 'model.num_layrs'",
    "Did you mean model.num_layers?",
  ),
  "generate without workdir": ("generate", "--workdir is missing"),
  "evaluate, empty folder": (
    "evaluate --workdir={inputs}/nothing",
    "{inputs}/nothing holds no run (config.json is missing)",
    "Train one",
  ),
  "generate, no folder": ("generate --workdir={inputs}/no", "{inputs}/no holds no run"),
  "generate, unknown flag": ("generate --workdir={trained} --promt=x", "promt", "prompt"),
  "generate, temperature": ("generate --workdir={trained} --temperature=-1", "--temperature=-1"),
  "generate, no temperature": (
    "generate --workdir={trained} --temperature=inf",
    "--temperature=inf is not a finite number",
  ),
  "generate, no share": ("generate --workdir={trained} --top_p=nan", "--top_p=nan is not a finite"),
  "generate, seed": (
    "generate --workdir={trained} --seed=99999999999999999999",
    "--seed=99999999999999999999",
    "[0, 4294967295]",
  ),
  "a workdir's name": ("decisions " + "x" * 256, "holds no decisions.jsonl"),
  "generate, prompt": (
    "generate --workdir={trained} --prompt=ab\udcff",  # how Python shows the byte ff
    "the prompt is not UTF-8 at character 2",
  ),
  "generate, missing step": (
    "generate --workdir={trained} --step=7",
    "no checkpoint 7 in {trained}/checkpoints; there are [",
    "40]",
  ),
  "evaluate, missing step": (
    "evaluate --workdir={trained} --step=lates",
    "no checkpoint 'lates' in {trained}/checkpoints; there are [",
  ),
  "evaluate, missing text": (
    "evaluate --workdir={trained} --paths=/no.txt",
    "'/no.txt' does not exist",
  ),
}


def test_command_line(inputs, trained, tmp_path):
  names, offenders = {"run": tmp_path / "run", "inputs": inputs, "trained": trained}, []
  for name, (line, *parts) in COMMANDS.items():
    result = called(*line.format(**names).split())
    if not says(result, *(p.format(**names) for p in parts)) or (tmp_path / "run").exists():
      offenders.append((name, result))
  assert not offenders


def test_malformed_lines_are_counted_and_named_and_the_rest_is_used(tiny, inputs, tmp_path):
  paths = f"data.paths={inputs}/mixed"
  settings = (*tiny, paths, "num_steps=2", "data.validation_fraction=0.0")
  result = called("train", *train_flags(tmp_path, *settings))
  assert result.code == 0, result.err
  for problem in ("broken JSON", "missing field", "field not a string", "not UTF-8"):
    assert f"1 {problem}" in result.err
  for line, what in {2: "broken JSON (", 3: "no field 'text'", 4: "field 'text' is int"}.items():
    assert f"{inputs}/mixed/lines.jsonl:{line}: {what}" in result.err
  assert f"{inputs}/mixed/latin.txt: not UTF-8 at byte 2 (ff)" in result.err
  assert committed_steps(tmp_path / "checkpoints") == [2]


class TestWorkdir:
  def test_is_a_file(self, tiny, tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    message = called("train", *train_flags(path, *tiny)).error()
    assert_says(message, f"workdir {path} cannot be used: it is a file", "another --workdir")
    assert path.read_text() == "x"

  def test_of_another_config(self, trained, trained_settings):
    before = (trained / "config.json").read_text()
    settings = (*trained_settings, "model.num_layers=2", "optimizer.b2=0.9", "checkpoint.keep=3")
    message = called("train", *train_flags(trained, *settings)).error()
    assert_says(
      message,
      f"{trained} holds a run with other settings:\n",
      "  model.num_layers: 1 -> 2\n  optimizer.b2: 0.95 -> 0.9\nUse another --workdir",
    )
    assert "checkpoint.keep" not in message  # that one may change
    assert (trained / "config.json").read_text() == before

  def test_whose_data_changed(self, trained, trained_settings, text):
    tokenizer = (trained / "tokenizer.json").read_text()
    more = text / "more.txt"
    more.write_text("quite other words")
    try:
      train = called("train", *train_flags(trained, *trained_settings))
      evaluate = called("evaluate", f"--workdir={trained}")
    finally:
      more.unlink()
    for result in (train, evaluate):
      assert_says(result.error(), "was trained on other data", "text files", "--paths")
    assert (trained / "tokenizer.json").read_text() == tokenizer

  def test_without_its_config(self, trained, tiny, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    message = called("train", *train_flags(tmp_path / "run", *tiny)).error()
    assert_says(message, "holds checkpoints but no config.json", "Restore the file")

  def test_with_a_broken_config(self, tiny, tmp_path):
    (tmp_path / "config.json").write_text('{"seed": ')
    for result in (
      called("train", *train_flags(tmp_path, *tiny)),
      called("generate", f"--workdir={tmp_path}"),
    ):
      assert_says(result.error(), f"{tmp_path}/config.json cannot be read", "Restore it")

  def test_without_a_checkpoint(self, trained, tmp_path):
    for name in ("config.json", "run_id", "tokenizer.json"):
      shutil.copy(trained / name, tmp_path)
    for verb in ("generate", "evaluate"):
      message = called(verb, f"--workdir={tmp_path}").error()
      assert_says(message, f"no checkpoint in {tmp_path}/checkpoints", "Train first")

  @pytest.mark.thorough
  def test_without_a_metric_for_the_best(self, tiny, tmp_path):
    settings = (*tiny, "data.validation_fraction=0.0")
    assert called("train", *train_flags(tmp_path, *settings)).code == 0
    message = called("generate", f"--workdir={tmp_path}", "--step=best").error()
    assert_says(message, "no checkpoint", "has a metric", "Choose a step of [4]")
    message = called("evaluate", f"--workdir={tmp_path}").error()
    assert_says(message, "validation split is empty", "data.validation_fraction", "--paths")


class TestDamage:
  def damage(self, folder: Path) -> None:
    """Change one byte of the largest file."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

  @pytest.mark.thorough
  def test_all(self, trained, trained_settings, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    steps = committed_steps(run / "checkpoints")
    for step in steps:
      self.damage(run / "checkpoints" / str(step))
    metrics = (run / "metrics.jsonl").read_text()
    for result in (
      called("train", *train_flags(run, *trained_settings)),
      called("generate", f"--workdir={run}"),
    ):
      message = result.error()
      for step in steps:
        assert f"{run}/checkpoints/{step}: state/" in message
      assert_says(message, "no intact checkpoint", "Nothing was restored", "use a new workdir")
    assert committed_steps(run / "checkpoints") == steps  # no fresh start
    assert (run / "metrics.jsonl").read_text() == metrics


@pytest.mark.thorough
def test_full_disk(tiny, tmp_path):
  settings = (*tiny, "checkpoint.every_steps=2", "optimizer.schedule=constant")
  assert called("train", *train_flags(tmp_path, *settings)).code == 0
  flags = train_flags(tmp_path, *settings, "num_steps=8")
  full = functools.partial(limit_file_size, 50)
  message = forked("ats_jax", "train", *flags, prepare=full).last_error()
  assert_says(
    message, f"checkpoint 6 was not saved to {tmp_path}/checkpoints", "File too large",
    "Older checkpoints are intact: [2, 4]", "Free space on the disk", "it resumes from the newest",
  )  # fmt: skip
  assert committed_steps(tmp_path / "checkpoints") == [2, 4]
  result = called("train", *flags)
  assert result.code == 0 and f"resuming {tmp_path} from step 4 of 8" in result.err
  assert committed_steps(tmp_path / "checkpoints") == [6, 8]

  # The other files fit, the rows of so many steps do not.
  flags = train_flags(tmp_path / "rows", *tiny, "num_steps=200", "optimizer.schedule=constant")
  full = functools.partial(limit_file_size, 24)
  message = forked("ats_jax", "train", *flags, prepare=full).last_error()
  assert_says(message, "a file could not be written", "File too large", "Free space on the disk")
