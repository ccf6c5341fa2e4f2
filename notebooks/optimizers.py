# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Comparing optimizers
# Two optimizers, two seeds each, the same text and steps: which has the lower validation loss,
# and is the difference larger than that of two seeds?
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


# %% [markdown]
# ## One config file, two variants
# What differs stands in one place. Each optimizer has a rate of its own, as one that suits
# this optimizer may not suit that one. `ats-jax train --explain=optimizer` has the names.

# %%
CONFIG = """
from ats_jax.config import base_config

RATES = {"adamw": 3e-3, "muon": 3e-3}


def get_config(variant: str = "adamw"):
  config = base_config()
  config.num_steps = 60
  config.model.num_layers = 2
  config.model.d_model = 64
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.model.d_ff = 192
  config.data.seq_len = 64
  config.data.batch_size = 16
  config.precision.compute_dtype = "float32"
  config.optimizer.name = variant
  config.optimizer.learning_rate = RATES[variant]
  config.optimizer.warmup_steps = 10
  config.eval.every_steps = 20
  return config
"""
with open("runs/small.py", "w") as file:
  file.write(CONFIG)

# %% [markdown]
# ## Train them all
# `compare` trains one after the other, each in a process of its own. If you interrupt it, the same
# command goes on.

# %%
printed = ats(
  "compare --config=runs/small.py:adamw,muon --seeds=2 --out=runs/optimizers "
  f"--config.data.paths={TEXT} --config.data.bpe_vocab_size=400 --config.sample.max_tokens=0 "
  "--config.data.validation_fraction=0.2 --config.eval.bigram_baseline=False "
  "--config.log.level=error --config.log.writers=jsonl --config.log.progress=False"
)

# %% [markdown]
# ## Look
# The page `runs/optimizers/report.html` has the curves, the intervals over seeds and the settings
# that differ. The same numbers are in each run's `metrics.jsonl`.

# %%
import json

import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 4))
final = {}
for color, name in zip(("C0", "C1"), ("adamw", "muon"), strict=True):
  for path in sorted(glob(f"runs/optimizers/*{name}*/metrics.jsonl")):
    with open(path) as lines:
      rows = [row for row in map(json.loads, lines) if "eval/loss" in row]
    axis.plot([r["step"] for r in rows], [r["eval/loss"] for r in rows], "o-", color=color)
    final.setdefault(name, []).append(round(rows[-1]["eval/loss"], 3))
  axis.plot([], [], color=color, label=name)
axis.set(xlabel="step", ylabel="validation loss (nats per token)")
axis.legend()
plt.show()
assert [len(losses) for losses in final.values()] == [2, 2]
print(final)

# %% [markdown]
# Sixty steps of a tiny model say nothing about yours: they show how to ask. Try more than one rate
# for each optimizer, and as many steps as you mean to train. docs/guides/optimizers.md says what
# each keeps in memory.
