"""What each command does for a user, and what a run leaves in its workdir."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import runs
from commands import REPOSITORY, called, forked, train_flags
from program_cache import user_cache
from xla_flags import FAST_STEPS, QUICK

from ats_jax.checkpoint import abstract_like, committed_steps, load_extra, restore_tree, workdir
from ats_jax.checkpoint.integrity import find_damage, read_manifest
from ats_jax.config.build import resolve
from ats_jax.data.splits import open_datasets
from ats_jax.data.tokens.file import load_tokenizer
from ats_jax.exits import STOPPED
from ats_jax.model.layout import stacks
from ats_jax.sharding.mesh import make_mesh
from ats_jax.step.program import make_program
from ats_jax.train.evaluate import score
from ats_jax.verbs.train import default_workdir


def evaluate(folder: Path, *flags: str) -> dict[str, float]:
  """The metrics that `ats-jax evaluate` prints."""
  result = called("evaluate", f"--workdir={folder}", *flags)
  assert result.code == 0, result.err
  return {name: float(value) for name, value in map(str.split, result.out.splitlines())}


def test_explain():
  setting, section = (called("train", f"--explain={x}") for x in ("data.seq_len", "checkpoint"))
  assert setting.code == section.code == 0
  assert setting.out == (
    "data.seq_len (int): length of a packed row\n"
    "    default 256; unit: tokens; range [8, 16777216]; fixed for a workdir\n"
  )
  assert re.findall(r"^(\S+) \(", section.out, re.MULTILINE) == [
    "checkpoint.every_steps", "checkpoint.keep", "checkpoint.keep_best",
    "checkpoint.local_every", "checkpoint.local_dir", "checkpoint.asynchronous",
  ]  # fmt: skip


def test_train_alone(tiny, tmp_path):
  """The packaged config `debug`, in runs/debug of the folder that one is in; both are said."""
  done = subprocess.run(
    [sys.executable, "-m", "ats_jax", "train", *(f"--config.{s}" for s in tiny)],
    capture_output=True,
    text=True,
    cwd=tmp_path,
    env={
      **os.environ,
      "XLA_FLAGS": QUICK,
      "PYTHONPATH": str(REPOSITORY),
      "XDG_CACHE_HOME": str(user_cache(tmp_path / "cache")),
    },
    timeout=runs.TIMEOUT_SECS,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("no --config is given: this is --config=debug\n") == 1
  assert done.stderr.count("no --workdir is given: this is --workdir=runs/debug\n") == 1
  assert committed_steps(tmp_path / "runs" / "debug" / "checkpoints") == [4]


def test_the_folder_of_a_config():
  folders = {"debug:moe": "debug-moe", "my.py": "my", "/a/b/wide.py:x": "wide-x", "b1": "b1"}
  assert {config: default_workdir(config) for config in folders} == {
    config: f"runs/{name}" for config, name in folders.items()
  }


class TestTrainedRun:
  def test_workdir(self, trained, trained_settings):
    steps = committed_steps(trained / "checkpoints")
    assert len(steps) == 3 and steps[-2:] == [35, 40]  # keep=2, and the best
    assert not [s for s in steps if find_damage(trained / "checkpoints" / str(s))]
    assert load_extra(trained / "checkpoints").keys() == {"position", "devices", "held_out"}
    cfg = workdir.load_config(trained)
    assert (cfg.num_steps, cfg.data.tokenizer, cfg.optimizer.ema_decay) == (40, "bpe", 0.5)
    assert load_tokenizer(trained / "tokenizer.json").decode([]) == ""
    metadata = json.loads((trained / "metadata.json").read_text())
    assert metadata["run"]["mesh"] == "stage=1, data=1, fsdp=1, expert=1, context=1, tensor=1"
    assert metadata["run"]["attention"].startswith("xla (")
    assert metadata["run"]["parameters"] > 10_000 and metadata["packages"]["jax"] == jax.__version__
    rows = runs.rows(trained, "train/loss")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert len((trained / "metrics.csv").read_text().splitlines()) > 40
    assert list(trained.glob("events.out.tfevents.*"))
    assert (trained / "samples" / "40.txt").read_text().startswith("def")
    assert {p.name.split(".")[0] for p in trained.iterdir() if p.name != ".lock"} == {
      "config", "data", "metadata", "tokenizer", "checkpoints", "events", "metrics", "samples",
      "profile", "performance", "run_id", "log",
    }  # fmt: skip
    (trace,) = (trained / "profile").rglob("*.xplane.pb")
    assert b"train_step" in trace.read_bytes()
    facts = json.loads((trained / "profile" / "30" / "summary.json").read_text())
    assert facts["num_kernels"] > 10 and facts["kernels"][0]["calls"] >= facts["steps"] == 3

  def test_report(self, trained, tmp_path):
    """By the command that the log ends with."""
    assert f"ats-jax report {trained}" in (trained / "log.txt").read_text().splitlines()[-1]
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    flags = (f"--out={page}", f"--json={data}", "--preset=debug")
    result = called("report", str(trained), *flags)
    assert result.code == 0, result.err
    assert f"{trained}: It finished at step 40 of 40." in result.out and str(page) in result.out
    assert page.read_text().startswith("<!doctype html>")
    (run,) = json.loads(data.read_text())["runs"]
    titles = [figure["title"] for figure in run["figures"]]
    assert titles[0] == "Loss" and "Where the time went" in titles and "Samples" in titles
    assert "Settings that differ from debug" in titles
    card = called("report", str(trained), "--card")
    assert card.code == 0 and card.out.startswith("## Run ")

  def test_evaluate(self, trained, tmp_path):
    """The last, the best and a chosen checkpoint, and other text."""
    row = runs.rows(trained, "eval/")[-1]
    assert row.pop("step") == 40
    last = evaluate(trained)
    assert last == {name: float(f"{value:.6g}") for name, value in row.items()}

    metric = {s: read_manifest(trained / f"checkpoints/{s}")["metric"] for s in (35, 40)}
    best = min(runs.rows(trained, "eval/"), key=lambda row: row["eval/loss"])
    assert best["eval/loss"] < min(metric.values())
    loss = evaluate(trained, "--step=best")["eval/loss"]
    assert loss == float(f"{best['eval/loss']:.6g}")
    assert evaluate(trained, f"--step={best['step']}")["eval/loss"] == loss
    assert evaluate(trained, "--step=35")["eval/loss"] == float(f"{metric[35]:.6g}")

    (tmp_path / "other.txt").write_text("something else " * 40)
    other = evaluate(trained, f"--paths={tmp_path}/other.txt")
    tokenizer = load_tokenizer(trained / "tokenizer.json")
    assert other["eval/tokens"] == len(tokenizer.encode("something else " * 40)) + 1
    assert other["eval/loss"] > last["eval/loss"]
    named = f"--paths=one={tmp_path}/other.txt,two={tmp_path}/other.txt"
    sets = json.loads(called("evaluate", f"--workdir={trained}", named, "--json").out)
    prefixes = [f"eval/{name}/" for name in ("one", "two")]
    assert {name: float(f"{value:.6g}") for name, value in sets.items()} == {
      name.replace("eval/", prefix): value for prefix in prefixes for name, value in other.items()
    }

  def test_evaluation_uses_the_average_of_the_weights(self, trained):
    """On another mesh too: this process has eight devices."""
    cfg = workdir.load_config(trained)
    _, valid_set = open_datasets(cfg.data, cfg.seed)
    cfg = resolve(cfg, valid_set.info.tokenizer.vocab_size)
    losses = {}
    mesh = make_mesh(cfg)
    with jax.set_mesh(mesh):
      program = make_program(cfg)
      for part in ("model", "ema"):
        abstract = abstract_like(getattr(program.init(abstract=True), part), mesh)
        _, weights, _ = restore_tree(
          trained / "checkpoints", abstract, 35, part, stacks=stacks(cfg)
        )
        losses[part] = score(program, weights, valid_set, 35)["eval/loss"]
    logged = read_manifest(trained / "checkpoints/35")["metric"]
    np.testing.assert_allclose(losses["ema"], logged, rtol=1e-4)
    assert abs(losses["model"] - logged) > 0.01

  def test_generate(self, trained):
    """The likeliest text whatever the seed, a drawn one by its seed, and an end at a stop text."""

    def generate(*flags):
      flags = (f"--workdir={trained}", "--prompt=return self", "--max_tokens=24", *flags)
      result = called("generate", *flags)
      assert result.code == 0, result.err
      return result.out

    greedy = ("--temperature=0", "--step=best")
    one, other = (generate(*greedy, f"--seed={seed}") for seed in (1, 2))
    assert one == other and one.startswith("return self") and len(one) > len("return self\n")
    drawn = [generate("--step=best", "--temperature=1", f"--seed={seed}") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    text = one.removeprefix("return self")
    stop = text.strip()[len(text) // 2 :][:3]
    stopped = generate(*greedy, f"--stop={stop}")
    assert stopped == "return self" + text[: text.index(stop)] + "\n"


@pytest.mark.thorough
@pytest.mark.parametrize("equal", ["flops", "time"])
def test_variants_are_compared_at_equal_cost(tiny, tmp_path, equal):
  """The second is far wider: it gets fewer steps. The same command again trains nothing."""
  config = tmp_path / "widths.py"
  config.write_text(
    "from ats_jax.config import base_config\n"
    "def get_config(variant):\n"
    "  config = base_config()\n"
    "  config.model.d_ff = int(variant)\n"
    "  return config\n"
  )
  settings = [f"--config.{name}" for name in tiny if not name.startswith("model.d_ff")]
  flags = (
    f"--config={config}:32,640",
    "--seeds=1",
    f"--equal={equal}",
    f"--out={tmp_path / 'out'}",
  )
  for _ in range(2):
    result = called("compare", *flags, *settings, "--config.num_steps=8")
    assert result.code == 0, result.err
    assert "640-0 is" in result.out and "says nothing about chance" in result.out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [run["state"] for run in report["runs"]] == ["finished", "finished"]
    steps = [workdir.load_config(tmp_path / "out" / name).num_steps for name in ("32-0", "640-0")]
    if equal == "flops":
      assert steps[0] == 8 and steps[1] < 8
    else:  # as its first call measured
      secs = json.loads((tmp_path / "out" / "step_secs.json").read_text())["step_secs"]
      assert steps == [8, max(1, round(8 * secs["32"] / secs["640"]))]


def test_ctrl_c(tiny, tmp_path):
  """The signal goes to the whole group, the two loader processes included."""
  settings = (*tiny, "optimizer.schedule=constant", "data.num_workers=2")
  with subprocess.Popen(
    [sys.executable, "-m", "ats_jax.train", *train_flags(tmp_path, *settings, "num_steps=1000000")],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=REPOSITORY,
    env={**os.environ, "PYTHONUNBUFFERED": "1", "XLA_FLAGS": QUICK},
    start_new_session=True,  # as a terminal starts it
  ) as process:
    runs.read_to(process, 3)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=runs.TIMEOUT_SECS)
  assert process.returncode == STOPPED, output
  assert "SIGINT: finishing the step and saving; press Ctrl-C again to exit at once" in output
  assert "Traceback" not in output
  (step,) = committed_steps(tmp_path / "checkpoints")
  assert output.endswith(f"SIGINT: saved step {step}. The same command goes on from there.\n")

  result = called("train", *train_flags(tmp_path, *settings, f"num_steps={step + 2}"))
  assert result.code == 0, result.err
  assert f"resuming {tmp_path} from step {step} of {step + 2}" in result.err
  assert len(runs.losses(tmp_path)) == step + 2  # none lost, none twice


def test_a_loss_that_is_not_finite_stops_the_run(tiny, tmp_path):
  settings = (*tiny, "num_steps=20", "optimizer.learning_rate=1e6", "checkpoint.every_steps=1")
  result = called("train", *train_flags(tmp_path, *settings))
  message = result.error()
  assert re.match(r"(train/loss|the norm of the weights) is (nan|inf) (at|after) step", message)
  assert "Lower optimizer.learning_rate, or look at the data" in message
  step = committed_steps(tmp_path / "checkpoints")[-1]
  assert not find_damage(tmp_path / "checkpoints" / str(step))
  saved = runs.arrays(tmp_path, step)
  assert all(np.isfinite(x).all() for x in saved.values() if x.dtype.kind == "f")


def test_bench_prints_one_json_line():
  settings = ("model.num_layers=1", "model.d_model=32", "model.d_ff=32", "data.seq_len=32")
  flags = ["--config=configs/debug.py", *(f"--config.{s}" for s in settings)]
  result = called("bench", "--steps=2", "--profile", *flags)
  assert result.code == 0, result.err
  assert re.search(r"kernels of 2 steps:\n +share +ms +calls  kernel\n +\d+\.\d% ", result.err)
  (line,) = result.out.splitlines()
  found = json.loads(line)
  assert found["device"] == "1 x cpu"
  assert found["tokens_per_sec"] == pytest.approx(16 * 32 / found["step_secs"])
  assert found["queued_tokens_per_sec"] == pytest.approx(16 * 32 / found["queued_step_secs"])
  assert found["compile_secs"] > 0 and 0 < found["loss"] < 20
  weights_and_moments = 3 * 4 * found["parameters"]
  assert found["memory/predicted_gib"] > weights_and_moments / 2**30


@pytest.mark.thorough
def test_bench_ops_checks_and_times_ops():
  result = forked("lab.ops", "--toy", "--only=rms_norm,swiglu", XLA_FLAGS=FAST_STEPS)
  assert result.code == 0, result.err
  rows = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")][1:]
  assert {r["op"] for r in rows} == {"rms_norm", "swiglu"}
  checked = [r for r in rows if r["implementation"] == "xla"]
  assert all(r["ok"] and "ms" in r and max(r["errors"]) < 4e-3 for r in checked)
  assert ("rms_norm", "backward") in {(r["op"], r["pass"]) for r in rows}
  assert result.out.count("| swiglu | 37 x 40 |") == 2  # the table at the end
