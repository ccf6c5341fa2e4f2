# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Reading a run
# What did a run do, was something wrong, and where did its time go? This notebook trains one with a
# learning rate that is far too high, lets the orchestrator watch it, and reads what is written.
#
# **What was tested.** CI executes every cell on a CPU, with Python 3.12 and 3.13 and the packages
# that Colab publishes. **What was not:** Colab itself, its T4 and its TPUs.

# %%
import os
import shlex
import subprocess
import sys
from glob import glob
from importlib.util import find_spec

if find_spec("ats_jax") is None:  # the wheel beside this notebook, or the checkout around it
  source = [*glob("ats_jax-*.whl"), ".."][0] + "[colab]" * ("COLAB_RELEASE_TAG" in os.environ)
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)

os.makedirs("runs", exist_ok=True)
TEXT = f"{os.path.dirname(subprocess.__file__)}/asyncio"  # half a megabyte that every Python has
SMALL = (
  "--config=debug --config.model.num_layers=2 --config.model.d_model=64 --config.data.seq_len=64 "
  f"--config.data.paths={TEXT} --config.data.bpe_vocab_size=400 --config.sample.max_tokens=0 "
  "--config.data.validation_fraction=0.2 --config.eval.bigram_baseline=False "
  "--config.log.level=warning --config.log.progress=False "
)


def ats(command: str, expected: int = 0) -> str:
  """Run `ats-jax COMMAND` in a process of its own; show what it prints, and return it."""
  lines = []
  words = [sys.executable, "-m", "ats_jax", *shlex.split(command)]
  with subprocess.Popen(
    words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
  ) as process:
    for line in process.stdout:
      lines.append(line)
      print(line, end="")
  assert process.returncode == expected, f"`{command}` ended with exit code {process.returncode}."
  return "".join(lines)


# %%
RATE = "--config.optimizer.learning_rate=0.3"
WATCHED = "--config.orchestrator.mode=act --config.orchestrator.check_interval=10"
printed = ats(
  f"train {SMALL} --workdir=runs/watched --config.num_steps=80 {RATE} {WATCHED} "
  "--config.eval.every_steps=20 --config.checkpoint.every_steps=20"
)

# %% [markdown]
# ## Metrics
# `metrics.jsonl` has a row a line, with `step`, `wall_time` and some metrics.
# docs/reference/metrics.md explains each name. Steps that the orchestrator has had made again keep
# the rows of the first time.

# %%
import json

with open("runs/watched/metrics.jsonl") as lines:
  rows = [json.loads(line) for line in lines]
names = sorted({name.split("/")[0] for row in rows for name in row if "/" in name})
print(f"{len(rows)} rows, metrics of {', '.join(names)}")
for row in rows:
  if "train/loss" in row:
    rate = row["train/learning_rate"]
    print(f"step {row['step']:3}  loss {row['train/loss']:.3f}  rate {rate:.4f}")
  elif "eval/loss" in row:
    print(f"step {row['step']:3}  validation loss {row['eval/loss']:.3f}")
assert rows[-1]["step"] == 80

# %% [markdown]
# ## Decisions
# What the orchestrator saw, compared and did, with its evidence. `--replay` decides again from what
# was seen, and verifies that the same comes out.

# %%
printed = ats("decisions runs/watched --replay")
assert "replayed: the same decisions" in printed

# %% [markdown]
# ## Time
# `performance.json` says where the time of the last start went. Of a run as short as this, little
# goes to its steps.

# %%
with open("runs/watched/performance.json") as file:
  print(json.dumps(json.load(file), indent=2))

# %% [markdown]
# ## The report
# All of it as one page, which opens offline: `runs/watched/report.html`. `--json` writes what its
# figures show, and `--card` prints a summary for an issue tracker. A live or killed run has a
# report too, and several runs have one together.

# %%
printed = ats("report runs/watched --json=runs/watched.json")
assert os.path.getsize("runs/watched/report.html") < 2e6
card = ats("report runs/watched --card")
