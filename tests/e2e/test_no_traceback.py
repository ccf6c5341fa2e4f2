"""Wrong words, files and numbers for every verb: a message that helps, code 2, no traceback."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT_MAY_DO_ANYTHING, called, drop_privileges, forked, train_flags

from ats_jax.verbs import VERBS

# Command line -> a part of the message. {in} is a folder of files that are no good, {ok} a trained
# run, {new} a folder that is not there; {in}/NAME of `BROKEN` is that run with one file replaced.
WRONG = {
  # Verbs and flags.
  "trian": "no command 'trian'. Did you mean train?",
  "''": "no command ''. There are train, launch,",
  "größer": "no command 'größer'",
  "train train": "unexpected argument 'train'. Everything is a flag",
  "train --workdri=x": "--workdri: there is no such flag. Did you mean --workdir?",
  "train --zzz=x": "--zzz: there is no such flag. ats-jax train --help lists them.",
  "plan ''": "unexpected argument ''",
  "plan --config": "Missing value for flag --config",
  "plan --flagfile=/no": "Unable to open flagfile",
  "plan budgets": "expected one command of budget, got 'budgets'",
  "data": "expected one command of stats, audit, explain, validate, prepare, report, got none",
  "data foo": "expected one command of stats, audit, explain, validate, prepare, report, got 'foo'",
  "data prepare": "--out is missing. Example: --out=prepared",
  "data prepare --out={new} --workers=-1": "--workers=-1",
  "data explain --row=-1": "--row=-1",
  "data validate --config.data.format=chat --config.data.packing=concat": "or set "
  "data.packing=best_fit",
  "data validate --config.data.paths={new}": "does not exist",
  "bridge import --workdir={new}": "--folder is missing",
  "bench stpe": "expected one command of step, sweep, got 'stpe'",
  "decisions": "expected one workdir, got none",
  "decisions a b": "expected one workdir, got a b",
  "launch": "expected one command of local, slurm, jobset, trainjob, skypilot, tpu, got none",
  "launch --processes=2": "expected one command of local, slurm",
  "launch local": "--processes is missing. Example: --processes=2",
  "launch local --processes=0": "--processes=0: 0 is not a positive integer",
  "launch local --processes=two": "--processes=two: 'two' is no whole number",
  "launch local --processes=1 --restarts=-1": "--restarts=-1",
  "launch slurm --workdir={new} --nodes=3": "Use a multiple of 24",
  "evaluate": "--workdir is missing. Example: --workdir=runs/debug",
  "forecast --workdir=": "--workdir is missing",
  "tune --only=nothing": "--only=nothing: no such op",
  # Configs and settings.
  "plan --config=dbug": "Did you mean debug?",
  "plan --config={in}": "is a folder",
  "plan --config=/dev/null": "no attribute 'get_config'",
  "plan --config=debug:größer": "unknown variant 'größer'",
  "plan --config={in}/binary.py": "{in}/binary.py: SyntaxError",
  "plan --config={in}/syntax.py": "{in}/syntax.py:1: SyntaxError: invalid syntax",
  "plan --config={in}/imports.py": "{in}/imports.py:1: ModuleNotFoundError",
  "plan --config={in}/endless.py": "{in}/endless.py:2: RecursionError",
  "plan --config={in}/none.py": "get_config() returned None, not a ConfigDict",
  "plan --config={in}/dict.py": "get_config() returned {{}}, not a ConfigDict",
  "plan --config={in}/arguments.py:x": "missing 1 required positional argument: 'b'",
  "plan --config={in}/section.py": "config: model is a section, got 3",
  "plan --config={in}/unicode.py": "unknown key model.größe",
  "plan --config.model=3": "--config.model: there is no such setting",
  "plan --config.modle.num_layers=3": "Did you mean --config.model.num_layers?",
  "plan --config.model.num_layers=": "model.num_layers (int): decoder blocks",
  "plan --config.model.num_layers=1e3": "'1e3' is no whole number",
  "plan --config.model.num_layers=99999999999999999999": "is too large: at most 10000",
  "plan --config.model.d_model=1000000000": "model.d_model=1000000000 is too large",
  "plan --config.data.batch_size=99999999999999": "data.batch_size=99999999999999 is too large",
  "plan --config.optimizer.learning_rate=nan": "learning_rate=nan is not a finite number",
  "plan --config.optimizer.learning_rate=1e400": "learning_rate=inf is not a finite number",
  "plan --config.seed=-1": "seed=-1 is too small: at least 0",
  "plan --config.length=budget --config.num_epochs=1": "both say when to end",
  "plan --devices=-1": "--devices=-1",
  "plan --devices=1e9": "--devices=1e9: '1e9' is no whole number",
  "plan --devices=7 --config.mesh.fsdp=2": "does not divide the 7 devices",
  "plan budget --tokens=x": "'x' is no number",
  "plan budget --tokens=1e400": "--tokens=inf is not a finite number",
  "plan budget --tokens=1e308": "--tokens=1e+308: expected a positive number",
  "plan budget --law=1e300,1,1,1,1": "five positive numbers E,A,B,alpha,beta between 0.001",
  "train --explain=": "no setting ''",
  "train --explain=größer": "no setting 'größer'",
  "config": "expected one command of import, show, diff, got none",
  "bridge": "expected one command of import, export, verify",
  "bridge import --folder={in}/nothing --workdir={new}": "config.json cannot be read",
  "bridge import --folder={in} --workdir={new}": "config.json cannot be read",
  "bridge export --workdir={in}/nothing --folder={new}": "{in}/nothing",
  "config show dbug": "Did you mean debug?",
  "config show {in}/nothing": "holds no run",
  "config diff debug": "expected ",
  "config import {in}/no.json": "no.json",
  "config import {in}/config_list/config.json": "config.json",
  "config import {in}/nothing": "nothing",
  # Runs that are none, or are damaged.
  "evaluate --workdir={in}/none.py": "holds no run",
  "evaluate --workdir=gs://": "names no bucket",
  "generate --workdir=foo://x": "expected a local path or one of gs://",
  "generate --workdir=" + "x" * 300: "holds no run",
  "evaluate --workdir={in}/config_list": "it holds no settings but []",
  "evaluate --workdir={in}/config_bytes": "config.json cannot be read",
  "evaluate --workdir={in}/config_folder": "Is a directory",
  "evaluate --workdir={in}/config_deep": "maximum recursion depth exceeded",
  "generate --workdir={in}/config_type": "model.num_layers must be int, got 'x'",
  "generate --workdir={in}/id_folder": "run_id: Is a directory",
  "generate --workdir={in}/tokenizer_list": "expected a JSON object, got [1]",
  "generate --workdir={in}/no_tokenizer": "tokenizer.json, cannot be read",
  "generate --workdir={in}/manifest_list": "no intact checkpoint",
  "evaluate --workdir={in}/checkpoints_file": "no checkpoint in",
  "decisions {in}": "holds no decisions.jsonl",
  "decisions {in}/decisions_bad": "decisions.jsonl",
  "decisions {in}/decisions_bytes": "decisions.jsonl",
  "forecast --workdir={in}/metrics_bad": "metrics.jsonl:1: not a row of metrics",
  "forecast --workdir={in}/metrics_bytes": "metrics.jsonl",
  "forecast --workdir={in}/metrics_folder": "metrics.jsonl: Is a directory",
  "forecast --workdir={in}/metrics_text": "eval/loss of step 1 is no number: 'x'",
  "forecast --workdir={ok} --coverage=2": "--coverage=2",
  "forecast --workdir={ok} --at=-1": "--at=-1",
  "forecast --workdir={ok} --reference={in}": "holds no run",
  "train --workdir={in}/config_folder": "Is a directory",
  # Numbers and texts of a verb.
  "generate --workdir={ok} --max_tokens=0": "--max_tokens=0: 0 is not a positive integer",
  "generate --workdir={ok} --max_tokens=9999999999": "sample.max_tokens=9999999999 is too large",
  "generate --workdir={ok} --temperature=1e308": "sample.temperature=1e+308 is too large",
  "generate --workdir={ok} --top_p=2": "--top_p=2",
  "generate --workdir={ok} --step=4.0": "no checkpoint '4.0'",
  "evaluate --workdir={ok} --paths={in}/nothing": "no file that can be read",
  "evaluate --workdir={ok} --paths=/dev/zero": "/dev/zero",
  "check_env --coordinator=node0": "a host and a port were expected, e.g. node0:1234",
  "data stats --config.data.paths=/no": "'/no' does not exist",
  "data report": "--out",
  "data report --out={in}": "{in} is a folder",
  "data report --out=/no/r.html": "there is no folder /no",
  "data stats --config.data.filters=dedup": "'dedup' is unknown",
  "bench --steps=0": "--steps=0",
  "bench --segments=9999": "--segments=9999 is outside",
  "bench --memory_gib=1e-9": "does not fit",
  "bench sweep --try=": "expected SETTING=VALUE,VALUE",
  "bench sweep --try=data.strict=maybe": "'maybe' is no bool",
  "bench sweep --out={in}": "is not empty",
  "bench sweep --out={in}/none.py": "File exists",
  "train --workdir={new} --init_step=best": "--init_step says which checkpoint of --init_from",
  "train --workdir=/dev/null/x": "Not a directory: '/dev/null/x'. Choose another",
}
BROKEN = {
  "config_list": ("config.json", b"[]"),
  "config_bytes": ("config.json", b"\xff\xfe\x00"),
  "config_folder": ("config.json", None),
  "config_deep": ("config.json", b"[" * 100_000),
  "config_type": ("config.json", b'{"format": 3, "model": {"num_layers": "x"}}'),
  "id_folder": ("run_id", None),
  "tokenizer_list": ("tokenizer.json", b"[1]"),
  "no_tokenizer": ("tokenizer.json", b""),
  "manifest_list": ("checkpoints/*/manifest.json", b"[]"),
  "checkpoints_file": ("checkpoints", b""),
  "decisions_bad": ("decisions.jsonl", b"{}\n"),
  "decisions_bytes": ("decisions.jsonl", b"\xff\n"),
  "metrics_bad": ("metrics.jsonl", b"{not json}\n"),
  "metrics_bytes": ("metrics.jsonl", b"\xff\n"),
  "metrics_folder": ("metrics.jsonl", None),
  "metrics_text": (
    "metrics.jsonl",
    b'{"step": 1, "eval/loss": "x", "train/learning_rate": 1}\n',
  ),
}
FILES = {
  "binary.py": b"\x00\xff",
  "syntax.py": b"def get_config(:\n",
  "imports.py": b"import no_such_module\n",
  "endless.py": b"def get_config():\n  return get_config()\n",
  "none.py": b"def get_config():\n  return None\n",
  "dict.py": b"def get_config():\n  return {}\n",
  "arguments.py": b"def get_config(a, b):\n  return a\n",
  "section.py": b"from ml_collections import ConfigDict\n"
  b"def get_config():\n  return ConfigDict({'model': 3})\n",
  "unicode.py": "from ats_jax.config import base_config\ndef get_config():\n"
  "  config = base_config()\n  config.model.größe = 3\n  return config\n".encode(),
}


@pytest.fixture(scope="module")
def inputs(trained, tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("in")
  (folder / "nothing").mkdir()
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


def test_a_message_and_no_traceback(inputs, trained, tmp_path):
  names, offenders = {"in": inputs, "ok": trained, "new": tmp_path / "new"}, []
  for line, part in WRONG.items():
    result = called(*shlex.split(line.format(**names)))
    try:
      assert part.format(**names) in result.error()
      assert result.out == "" and not (tmp_path / "new").exists()
    except (AssertionError, ValueError):
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


@pytest.mark.skipif(ROOT_MAY_DO_ANYTHING, reason="root may do anything")
def test_files_that_may_not_be_touched(tiny, trained, tmp_path):
  """By an ordinary user: a run's files, a text, and the folder of a workdir."""
  refused = lambda *words: forked(*words, prepare=drop_privileges).error()
  for name in ("config.json", "metrics.jsonl"):
    run = shutil.copytree(trained, tmp_path / name)
    (run / name).chmod(0)
    message = refused("ats_jax", "forecast", f"--workdir={run}")
    assert name in message and "Permission denied" in message

  path = tmp_path / "secret.txt"
  path.write_text("secret " * 100)
  path.chmod(0)
  message = refused("ats_jax", "train", *train_flags(tmp_path / "x", *tiny, f"data.paths={path}"))
  assert f"{path}: cannot be read (Permission denied)" in message and "data.paths" in message

  (tmp_path / "locked").mkdir(mode=0o500)
  run = tmp_path / "locked" / "run"
  message = refused("ats_jax", "train", *train_flags(run, *tiny))
  (tmp_path / "locked").chmod(0o700)
  assert f"workdir {run} cannot be used" in message and "Permission denied" in message
  assert "another --workdir" in message


def test_a_file_in_place_of_a_log(trained, trained_settings, tmp_path):
  """Found when it is opened, after the model is there."""
  run = shutil.copytree(trained, tmp_path / "run")
  (run / "metrics.jsonl").unlink()
  (run / "metrics.jsonl").mkdir()
  result = called("train", *train_flags(run, *trained_settings))
  assert "metrics.jsonl" in result.error() and "Is a directory" in result.error()
