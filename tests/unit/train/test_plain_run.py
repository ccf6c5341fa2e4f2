"""What a plain run imports: code for what it does not ask for stays out of its process."""

import json
import os
import subprocess
import sys
from pathlib import Path

from commands import REPOSITORY
from helpers import CACHED
from xla_flags import QUICK

CODE = """
import json, sys
from pathlib import Path
from ats_jax.config import from_config_dict
from ats_jax.config.tree import updated
from ats_jax.config.file import load_file
from ats_jax.verbs import train  # as `ats-jax train` does
from ats_jax.train.loop import train_to_end
folder = Path(sys.argv[1])
(folder / "text.txt").write_text("some words that come again and again. " * 200)
settings = {
  "num_steps": 2, "compilation_cache": sys.argv[2], "model.num_layers": 1, "model.d_model": 16,
  "model.num_heads": 2, "model.num_kv_heads": 2, "model.d_ff": 32, "data.tokenizer": "bytes",
  "data.paths": (str(folder / "text.txt"),), "data.cache_dir": str(folder / "cache"),
  "data.seq_len": 16, "data.batch_size": 8, "data.num_workers": 0,
  "data.validation_fraction": 0.3, "optimizer.warmup_steps": 1, "eval.every_steps": 2,
  "eval.bigram_baseline": False, "sample.max_tokens": 0, "log.progress": False,
  "log.writers": ("tensorboard", "jsonl"), "orchestrator.mode": "off",
}
cfg = from_config_dict(updated(load_file("debug").to_dict(), settings))
train_to_end(cfg, folder / "run")
print("LOADED", json.dumps(sorted(name for name in sys.modules if name.startswith("ats_jax."))))
"""
# Packages and modules that a run imports only if its config asks for what they do, by package.
OPTIONAL = {
  "": ("api", "bridge", "inference", "planner", "pytorch"),
  "cluster": ("launch", "preflight"),
  "data": ("chat", "filters", "look", "rows.buckets", "rows.mixture", "rows.stream"),
  "model": ("adapters", "latent_attention", "mod", "moe", "pipelined", "router"),
  "ops": ("expert_exchange", "fp8_matmul", "grouped_matmul", "quantise", "routing"),
  "ops.attention": ("latent", "ulysses"),
  "orchestrator": ("actions", "policy", "record", "signals", "supervisor", "trials"),
  "sharding": ("pipeline",),
  "train": ("initial_weights", "probe_rows", "supervise"),
  "verbs": ("bench",),
}
# Every module of this package that a plain run imports, one on a line.
EXPECTED = Path(__file__).with_name("plain_run_modules.txt")


def test_a_plain_run_imports_no_optional_part(tmp_path):
  command = [sys.executable, "-c", CODE, str(tmp_path), CACHED["compilation_cache"]]
  env = {**os.environ, "XLA_FLAGS": QUICK}
  done = subprocess.run(
    command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
  loaded = json.loads(line.removeprefix("LOADED "))
  optional = [f"ats_jax.{package}.{m}." for package, names in OPTIONAL.items() for m in names]
  optional = tuple(name.replace("..", ".") for name in optional)
  assert not [name for name in loaded if f"{name}.".startswith(optional)]
  expected = EXPECTED.read_text().split()
  new, gone = sorted({*loaded} - {*expected}), sorted({*expected} - {*loaded})
  assert not new, f"a plain run also imports {new}: import late, or add to {EXPECTED.name}"
  assert not gone, f"a plain run no longer imports {gone}: remove them from {EXPECTED.name}"
