"""What a user can get wrong: code 2, and a message that says what, where and what to do."""

import functools
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import commands
import pytest
import runs
from commands import (
  ROOT_MAY_DO_ANYTHING,
  Result,
  called,
  drop_privileges,
  forked,
  train_flags,
)

from ats_jax import api
from ats_jax.checkpoint import committed_steps
from ats_jax.exits import REFUSED
from ats_jax.verbs import VERBS


def assert_says(message: str, *parts: str) -> None:
  for part in parts:
    assert part in message, message


def refused(result: Result, *parts: str) -> bool:
  """Whether a command was refused, without a traceback, by a message with all these parts."""
  plain = result.code == REFUSED and "Traceback" not in result.out + result.err
  return plain and not result.out and all(p in result.err.partition("error: ")[2] for p in parts)


# A file of a run -> what is in its place, None for a folder.
BROKEN = {
  "config_list": ("config.json", b"[]"),
  "config_folder": ("config.json", None),
  "config_deep": ("config.json", b"[" * 100_000),
  "config_hf": ("config.json", b'{"model_type": "llama"}'),
  "id_folder": ("run_id", None),
  "tokenizer_list": ("tokenizer.json", b"[1]"),
  "decisions_bad": ("decisions.jsonl", b"{}\n"),
  "metrics_bad": ("metrics.jsonl", b"{not json}\n"),
  "metrics_folder": ("metrics.jsonl", None),
  "metrics_text": (
    "metrics.jsonl",
    b'{"step": 1, "eval/loss": "x", "train/learning_rate": 1}\n',
  ),
}
CONFIG = "from ats_jax.config import base_config\ndef get_config():\n  config = base_config()\n"
FILES = {
  "empty.txt": b"",
  "latin.txt": b"abc caf\xe9",
  "short.txt": b"hi",
  "picture.jpg": b"\xff\xd8",
  "mixed/lines.jsonl": b'{"text": "%s"}\n{"text": broken\n{"txt": "x"}\n{"text": 3}'
  % (9 * b"good "),
  "mixed/latin.txt": b"ab\xff",
  "tokenizer.json": b'{"version": "1.0"}',
  "binary.py": b"\x00\xff",
  "syntax.py": b"def get_config(:\n",
  "imports.py": b"import no_such_module\n",
  "endless.py": b"def get_config():\n  return get_config()\n",
  "none.py": b"def get_config():\n  pass\n",
  "arguments.py": b"def get_config(a, b):\n  return a\n",
  "exit.py": b"import sys\nsys.exit(0)\n",
  "name.py": b"def get_config():\n  return seed\n",
  "type.py": f"{CONFIG}  config.model.num_layers = 'four'\n  return config\n".encode(),
  "typo.py": f"{CONFIG}  config.model.num_layrs = 4\n  return config\n".encode(),
  "unicode.py": f"{CONFIG}  config.model.größe = 3\n  return config\n".encode(),
  "section.py": b"from ml_collections import ConfigDict\n"
  b"def get_config():\n  return ConfigDict({'model': 3})\n",
}


@pytest.fixture(scope="module")
def inputs(trained, tmp_path_factory) -> Path:
  """A folder of files that are no good, and of runs of which one file is none."""
  folder = tmp_path_factory.mktemp("in")
  for name in ("nothing", "mixed"):
    (folder / name).mkdir()
  for name, content in FILES.items():
    (folder / name).write_bytes(content)
  for name, (file, content) in BROKEN.items():
    run = shutil.copytree(trained, folder / name)
    for path in run.glob(file):
      if path.is_dir():
        shutil.rmtree(path)
      path.unlink(missing_ok=True)
      if content is None:
        path.mkdir()
      else:
        path.write_bytes(content)
  return folder


# Settings of a run on text -> parts of the message. {in} is the folder of `inputs`.
SETTINGS = {
  "data.paths={in}/no.txt": ("{in}/no.txt' does not exist",),
  "data.paths={in}/*.rs": ("{in}/*.rs' matches no file",),
  "data.paths={in}/empty.txt": ("1 empty", "Check data.paths"),
  "data.paths={in}/picture.jpg": ("picture.jpg' has a suffix", ".jsonl"),
  "data.paths={in}/latin.txt": ("{in}/latin.txt: not UTF-8 at byte 7 (e9)",),
  "data.paths={in}/mixed/lines.jsonl data.strict=True": (
    "{in}/mixed/lines.jsonl:2: broken JSON",
    "Mend it, or set data.strict=False",
  ),
  "data.paths={in}/short.txt data.validation_fraction=0.0": (
    "has 3 tokens in 1 documents, less than one row of data.seq_len=32",
    "set data.seq_len to at most 3",
  ),
  "model.vocab_size=100": (
    "model.vocab_size=100 is smaller than the tokenizer's 259 tokens",
    "Use at least 259, or 0",
  ),
  "data.tokenizer={in}/no.json": (
    "data.tokenizer is '{in}/no.json', and there is no such file. Expected 'bytes', 'bpe' or",
  ),
  "data.tokenizer={in}/tokenizer.json": (
    "{in}/tokenizer.json' is not a tokenizer.json: it has no field 'model'",
  ),
  "log.writers=console,jsonnl": ("log.writers='jsonnl' is unknown", "Did you mean 'jsonl'?"),
  "compilation_cache={in}/short.txt": (
    "compilation cache {in}/short.txt cannot be made: File exists",
    "compilation_cache to 'off'",
  ),
  "model.num_heads=3 model.num_kv_heads=3": (
    "model.num_heads=3 does not divide model.d_model=32",
    "Change one",
  ),
  "model.num_layrs=3": ("no such setting", "Did you mean --config.model.num_layers?"),
  "model.num_layers=abc": (
    "--config.model.num_layers=abc",
    "(int): decoder blocks",
    "range [1, 10000]",
  ),
  "data.strict=maybe": ("--config.data.strict=maybe", "data.strict (bool)"),
}


def test_settings_and_data(tiny, inputs, tmp_path):
  offenders = []
  for settings, parts in SETTINGS.items():
    given = settings.replace("{in}", str(inputs)).split()
    result = called("train", *train_flags(tmp_path / "run", *tiny, *given))
    if not refused(result, *(part.replace("{in}", str(inputs)) for part in parts)):
      offenders.append((settings, result))
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
    assert_says(str(error.value), *parts)


# Command line -> a part of the message, or several. {ok} is a trained run, {new} a folder that is
# not there.
WRONG = {
  # Verbs and flags.
  "trian": "no command 'trian'. Did you mean train?",
  "''": "no command ''. There are train, finetune, launch,",
  "finetune --data=chats.jsonl --workdir={new}": "--init_from is missing",
  "größer": "no command 'größer'",
  "train config.num_steps=3": "unexpected argument 'config.num_steps=3'. Everything is a flag",
  "train --workdri=x": "--workdri: there is no such flag. Did you mean --workdir?",
  "train --zzz=x": "--zzz: there is no such flag. ats-jax train --help lists them.",
  "plan --config": "Missing value for flag --config",
  "plan --flagfile=/no": "Unable to open flagfile",
  "data": "expected one command of stats, audit, explain, validate, prepare, report, got none",
  "data prepare": "--out is missing. Example: --out=prepared",
  "data prepare --out={new} --workers=-1": "--workers=-1",
  "data explain --row=-1": "--row=-1",
  "data validate --config.data.format=chat --config.data.packing=concat": "or set "
  "data.packing=best_fit",
  "bench stpe": "expected one command of step, sweep, got 'stpe'",
  "decisions": "expected one workdir, got none",
  "decisions a b": "expected one workdir, got a b",
  "report": "expected one workdir or several, got none",
  "compare": "--out is missing. Example: --out=runs/compared",
  "compare --out={new} --config=debug": "expected several variants of one config",
  "compare --out={new} --config=debug:dense,foo": "unknown variant 'foo'",
  "compare --out={new} --config=debug:dense,moe --config.num_epochs=1": "Set length=given, num_ep",
  "launch": "expected one command of local, slurm, jobset, trainjob, skypilot, tpu, got none",
  "launch local": "--processes is missing. Example: --processes=2",
  "launch local --processes=0": "--processes=0: 0 is not a positive integer",
  "launch local --processes=1 --restarts=-1": "--restarts=-1",
  "evaluate": "--workdir is missing. Example: --workdir=runs/debug",
  "tune --only=nothing": "--only=nothing: no such op",
  "train --explain=model.num_layrs": ("no setting 'model.num_layrs'", "mean model.num_layers?"),
  "train --explain=": "no setting ''",
  # Configs and settings.
  "plan --config=configs/no.py": ("No such file or directory", f"seen from {commands.REPOSITORY}"),
  "plan --config={in}": "is a folder",
  "plan --config=": "the name of the file is empty",
  "plan --config=/dev/null": "no attribute 'get_config'",
  "plan --config=configs/debug.py:foo": (
    "configs/debug.py: unknown variant 'foo'",
    "Choose one of dense, moe, mod, hybrid, null.",
  ),
  "plan --config={in}/binary.py": "{in}/binary.py: SyntaxError",
  "plan --config={in}/syntax.py": "{in}/syntax.py:1: SyntaxError: invalid syntax",
  "plan --config={in}/imports.py": "{in}/imports.py:1: ModuleNotFoundError",
  "plan --config={in}/endless.py": "{in}/endless.py:2: RecursionError",
  "plan --config={in}/none.py": ("get_config() returned None, not a ConfigDict", "`return config`"),
  "plan --config={in}/arguments.py:x": "missing 1 required positional argument: 'b'",
  "plan --config={in}/exit.py": "{in}/exit.py:2: SystemExit: 0\n",
  "plan --config={in}/name.py": "{in}/name.py:2: NameError: name 'seed' is not defined\n",
  "plan --config={in}/type.py": ("{in}/type.py:4: TypeError: ", "num_layers", "four"),
  "plan --config={in}/typo.py": "unknown key model.num_layrs. Did you mean model.num_layers?",
  "plan --config={in}/unicode.py": "unknown key model.größe",
  "plan --config={in}/section.py": "config: model is a section, got 3",
  "plan --config.model=3": "--config.model: there is no such setting",
  "plan --config.model.num_layers=1e3": "'1e3' is no whole number",
  "plan --config.model.num_layers=99999999999999999999": "is too large: at most 10000",
  "plan --config.optimizer.learning_rate=1e400": "learning_rate=inf is not a finite number",
  "plan --devices=1e9": "--devices=1e9: '1e9' is no whole number",
  "plan --devices=7 --config.mesh.fsdp=2": "does not divide the 7 devices",
  "plan budget --tokens=1e400": "--tokens=inf is not a finite number",
  "plan budget --tokens=1e308": "--tokens=1e+308: expected a positive number",
  "plan budget --law=1e300,1,1,1,1": "five positive numbers E,A,B,alpha,beta between 0.001",
  "bridge": "expected one command of import, export, verify",
  "bridge import --folder={in} --workdir={new}": "config.json cannot be read",
  "bridge export --workdir={in}/nothing --folder={new}": "{in}/nothing",
  "config show {in}/nothing": "holds no run",
  "config diff debug": "expected ",
  "config import {in}/config_list/config.json": "config.json",
  # Runs that are none, or are damaged.
  "evaluate --workdir={in}/nothing": ("{in}/nothing holds no run (config.json is", "Train one"),
  "evaluate --workdir={in}/config_list": "it holds no settings but []",
  "train --workdir={in}/config_folder": "Is a directory",
  "evaluate --workdir={in}/config_deep": "it is nested too deeply",
  "generate --workdir={in}/config_hf --prompt=a": (
    "a model of Hugging Face ('llama')",
    "bridge import --folder={in}/config_hf --workdir=OTHER",
  ),
  "generate --workdir={in}/id_folder": "run_id: Is a directory",
  "generate --workdir={in}/tokenizer_list": "expected a JSON object, got [1]",
  "decisions {in}": "holds no decisions.jsonl",
  "decisions {in}/decisions_bad": "decisions.jsonl",
  "report {in}/no_folder": "{in}/no_folder holds no run (config.json is missing). Name the",
  "report {in}/nothing": "{in}/nothing holds no run (config.json is missing). Name the --workdir",
  "report {ok} {in}/metrics_bad": "metrics.jsonl:1: not a row of metrics",
  "report {ok} --by=epochs": "--by=epochs",
  "report {ok} --out={in}": "--out={in} is a folder",
  "report {ok} --json=/no/r.json": "--json=/no/r.json: there is no folder /no",
  "report {ok} --card --out=x.html": "--card writes no page to a file, so --out has no effect",
  "report {ok} --serve=8000 --card": "--serve writes no page to a file, so --card has no effect",
  "report {ok} --preset=debug:foo": "unknown variant 'foo'",
  "forecast --workdir={in}/metrics_bad": "metrics.jsonl:1: not a row of metrics",
  "forecast --workdir={in}/metrics_folder": "metrics.jsonl: Is a directory",
  "forecast --workdir={in}/metrics_text": "eval/loss of step 1 is no number: 'x'",
  # Numbers and texts of a verb.
  "generate --workdir={ok} --max_tokens=0": "--max_tokens=0: 0 is not a positive integer",
  "generate --workdir={ok} --max_tokens=9999999999": "sample.max_tokens=9999999999 is too large",
  "generate --workdir={ok} --temperature=-1": "--temperature=-1",
  "generate --workdir={ok} --temperature=inf": "--temperature=inf is not a finite number",
  "generate --workdir={ok} --top_p=2": "--top_p=2",
  "generate --workdir={ok} --min_p=2": "--min_p=2",
  "generate --workdir={ok}": "there is no prompt",
  "generate --workdir={ok} --prompt=a --prompts=b": "--prompt and --prompts both say",
  "generate --workdir={ok} --prompt=a --adapter=base={in}": "its name is that of the model alone",
  "evaluate --workdir={ok} --adapter={in}/empty.txt": "{in}/empty.txt holds no adapter_config.json",
  "chat --workdir={ok} --adapter=base={in}": "its name is that of the model alone",
  "generate --workdir={ok} --prompts={in}/no.txt": "{in}/no.txt: No such file",
  "generate --workdir={ok} --prompts={in}/empty.txt": "{in}/empty.txt holds no prompt",
  "generate --workdir={ok} --prompts={in}/latin.txt": "{in}/latin.txt:1: not UTF-8 at byte 7",
  "generate --workdir={ok} --prompts={in}/mixed/lines.jsonl": (
    "{in}/mixed/lines.jsonl:1: expected a JSON object with either"
  ),
  "chat": "--workdir is missing",
  "chat --workdir={ok}": "this run was not trained on conversations",
  # The byte ff, as Python shows it.
  "generate --workdir={ok} --prompt=ab\udcff": "sample.prompt is not UTF-8 at character 2",
  "generate --workdir={ok} --step=7": ("no checkpoint 7 in {ok}/checkpoints; there are [", "40]"),
  "evaluate --workdir={ok} --step=lates": "no checkpoint 'lates' in {ok}/checkpoints; there are [",
  "evaluate --workdir={ok} --paths=/no.txt": "'/no.txt' does not exist",
  "evaluate --workdir={ok} --paths=/dev/zero": "/dev/zero",
  "evaluate --workdir={ok} --paths=a.txt --tasks=a": "--tasks and --paths both say",
  "evaluate --workdir={ok} --limit=3": "--num_fewshot and --limit are of tasks",
  "evaluate --workdir={ok} --engine=pages=int8": "--engine is of what does tasks",
  "generate --workdir={ok} --prompt=a --engine=pages=int4": "pages='int4': expected 'int8', 'fp8'",
  "generate --workdir={ok} --prompt=a --engine=speculate=x": "speculate='x' is not a whole number",
  "generate --workdir={ok} --prompt=a --engine=int8": "--engine: 'int8': expected NAME=VALUE",
  "generate --workdir={ok} --prompt=a --engine=draft=x": "many tokens it guesses is missing",
  "generate --workdir={ok} --prompt=a --engine=draft=x,speculate=2": "x holds no run",
  "generate --workdir={ok} --prompt=a --engine=tensor=2": "tensor=2 x expert=1 devices, and there",
  "evaluate --workdir={ok} --tasks=a --limit=0": "--limit=0",
  "check_env --coordinator=node0": "a host and a port were expected, e.g. node0:1234",
  "data report --out={in}": "{in} is a folder",
  "data report --out=/no/r.html": "there is no folder /no",
  "bench --steps=0": "--steps=0",
  "bench --segments=9999": "--segments=9999 is outside",
  "bench sweep --try=": "expected SETTING=VALUE,VALUE",
  "bench sweep --out={in}/none.py": "File exists",
  "train --workdir={new} --init_step=best": "--init_step says which checkpoint of --init_from",
  "train --workdir=/dev/null/x": "Not a directory: '/dev/null/x'. Choose another",
}


def test_command_lines(inputs, trained, tmp_path):
  places, offenders = {"{in}": inputs, "{ok}": trained, "{new}": tmp_path / "new"}, []
  put = lambda line: functools.reduce(lambda s, at: s.replace(at, str(places[at])), places, line)
  for line, parts in WRONG.items():
    result = called(*shlex.split(put(line)))
    said = map(put, (parts,) if isinstance(parts, str) else parts)
    if not refused(result, *said) or (tmp_path / "new").exists():
      offenders.append((line, result))
  assert not offenders
  assert set(VERBS) <= {line.split()[0] for line in WRONG}  # every verb is tried


def test_a_reader_that_has_enough():
  """As in `ats-jax plan --help | head -1`."""
  command = [sys.executable, "-m", "ats_jax", "plan", "--help"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    process.stdout.close()
    said = process.stderr.read().decode()
  assert process.returncode == 141 and not said


def test_malformed_lines_are_counted_and_named_and_the_rest_is_used(tiny, inputs, tmp_path):
  settings = (*tiny, f"data.paths={inputs}/mixed", "data.validation_fraction=0.0")
  result = called("train", *train_flags(tmp_path, *settings))
  assert result.code == 0, result.err
  for problem in ("broken JSON", "missing field", "field not a string", "not UTF-8"):
    assert f"1 {problem}" in result.err
  for line, what in {2: "broken JSON (", 3: "no field 'text'", 4: "field 'text' is int"}.items():
    assert f"{inputs}/mixed/lines.jsonl:{line}: {what}" in result.err
  assert f"{inputs}/mixed/latin.txt: not UTF-8 at byte 2 (ff)" in result.err
  assert committed_steps(tmp_path / "checkpoints") == [4]
  message = called("generate", f"--workdir={tmp_path}", "--step=best").error()
  assert_says(message, "no checkpoint", "has a metric", "Choose a step of [4]")
  message = called("evaluate", f"--workdir={tmp_path}").error()
  assert_says(message, "validation split is empty", "data.validation_fraction", "--paths")


class TestPrompts:
  """Those of a file that cannot be continued, among others."""

  def answers(self, folder, run, *prompts, max_tokens=8):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags = (f"--prompts={path}", f"--max_tokens={max_tokens}", "--temperature=0")
    result = called("generate", f"--workdir={run}", *flags)
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]

  def test_each_has_a_line_of_its_own(self, trained, tmp_path):
    good = ["def", "", "return self"]
    alone = self.answers(tmp_path, trained, *good)
    assert [row["prompt"] for row in alone] == good
    long = "x " * 200
    rows = self.answers(tmp_path, trained, good[0], long, *good[1:])
    assert [rows[0], *rows[2:]] == alone
    assert rows[1]["prompt"] == long and "text" not in rows[1]
    assert_says(rows[1]["error"], "the prompt has ", " tokens, but prompt and answer have room for")
    rows = self.answers(tmp_path, trained, *good, max_tokens=1000)
    assert all("max_tokens=1,000 and a prompt of" in row["error"] for row in rows)

  @pytest.mark.thorough
  def test_a_ctrl_c_leaves_whole_lines(self, trained, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"def {i}\n" for i in range(5000)))
    process = runs.start(trained, verb=("generate", f"--prompts={path}", "--max_tokens=24"))
    lines = [process.stdout.readline()]
    while not lines[-1].startswith("{"):
      lines.append(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=runs.TIMEOUT_SECS)
    *rows, last = rest.splitlines()
    assert process.returncode == 128 + signal.SIGINT and last == "interrupted"
    assert len(rows) < 5000 and all(json.loads(row)["text"] for row in rows)


@pytest.mark.skipif(ROOT_MAY_DO_ANYTHING, reason="root may do anything")
def test_files_that_may_not_be_touched(tiny, trained, tmp_path):
  """By an ordinary user: a run's files, a text, and the folder of a workdir."""
  message_of = lambda *words: forked(*words, prepare=drop_privileges).error()
  run = shutil.copytree(trained, tmp_path / "run")
  (run / "metrics.jsonl").chmod(0)
  message = message_of("ats_jax", "forecast", f"--workdir={run}")
  assert_says(message, "metrics.jsonl", "Permission denied")

  path = tmp_path / "secret.txt"
  path.write_text("secret " * 100)
  path.chmod(0)
  flags = train_flags(tmp_path / "x", *tiny, f"data.paths={path}")
  message = message_of("ats_jax", "train", *flags)
  assert_says(message, f"{path}: cannot be read (Permission denied)", "data.paths")

  (tmp_path / "locked").mkdir(mode=0o500)
  run = tmp_path / "locked" / "run"
  message = message_of("ats_jax", "train", *train_flags(run, *tiny))
  (tmp_path / "locked").chmod(0o700)
  assert_says(message, f"workdir {run} cannot be used", "Permission denied", "another --workdir")


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

  def test_whose_data_changed(self, trained, trained_settings, text, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    tokenizer = (run / "tokenizer.json").read_text()
    more = text / "more.txt"
    more.write_text("quite other words")
    try:
      train = called("train", *train_flags(run, *trained_settings))
      evaluate = called("evaluate", f"--workdir={run}")
    finally:
      more.unlink()
    for result in (train, evaluate):
      assert_says(result.error(), "was trained on other data", "text files", "--paths")
    assert (run / "tokenizer.json").read_text() == tokenizer

  def test_without_a_file_that_it_needs(self, trained, tiny, trained_settings, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()  # found when it is opened, after the model is there
    message = called("train", *train_flags(run, *trained_settings)).error()
    assert_says(message, "metrics.jsonl", "Is a directory")
    kept = (run / "tokenizer.json").rename(run / "kept")
    message = called("generate", f"--workdir={run}", "--prompt=a").error()
    assert_says(message, f"the tokenizer of this run, {run}/tokenizer.json, cannot be read")
    kept.rename(run / "tokenizer.json")
    (run / "config.json").unlink()
    message = called("train", *train_flags(run, *tiny)).error()
    assert_says(message, "holds checkpoints but no config.json", "Restore the file")
    shutil.copy(trained / "config.json", run)
    shutil.rmtree(run / "checkpoints")
    for verb in ("generate", "evaluate"):
      message = called(verb, f"--workdir={run}").error()
      assert_says(message, f"no checkpoint in {run}/checkpoints", "Train first")


def damage(folder: Path) -> None:
  """Change one byte of the largest file."""
  path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def test_damaged_checkpoints(trained, trained_settings, tmp_path):
  """A run goes on from the newest one that is intact, and begins anew never."""
  run = shutil.copytree(trained, tmp_path / "run")
  damage(run / "checkpoints" / "40")
  evaluated = called("evaluate", f"--workdir={run}")  # changes nothing
  assert evaluated.code == 0 and f"checkpoint 35 of {run}" in evaluated.err, evaluated.err
  assert committed_steps(run / "checkpoints")[-1] == 40
  flags = train_flags(run, *trained_settings)
  result = called("train", *flags)
  assert result.code == 0, result.err
  (line,) = [line for line in result.err.splitlines() if "checkpoint 40 is damaged" in line]
  assert_says(line, "has changed: sha256", "Using 35 instead")
  assert_says(line, f"the damaged one is now {run}/checkpoints/40.damaged")
  assert f"resuming {run} from step 35 of 40" in result.err
  assert runs.losses(run) == runs.losses(trained)

  steps, metrics = committed_steps(run / "checkpoints"), (run / "metrics.jsonl").read_text()
  for step in steps:
    damage(run / "checkpoints" / str(step))
  for result in (called("train", *flags), called("generate", f"--workdir={run}")):
    message = result.error()
    assert_says(message, *(f"{run}/checkpoints/{step}: state/" for step in steps))
    assert_says(message, "no intact checkpoint", "Nothing was restored", "use a new workdir")
  assert committed_steps(run / "checkpoints") == steps
  assert (run / "metrics.jsonl").read_text() == metrics
