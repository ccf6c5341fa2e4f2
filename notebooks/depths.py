# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Mixture of depths
# In every other layer, only one token in eight is processed; the others pass by. What does that
# save, and how many layers does a token go through? This notebook trains such a model beside a
# dense one of as many layers.
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
# ## What it saves
# `plan` computes it, and trains nothing.

# %%
printed = ats("plan --config=debug:mod --config.model.num_layers=4 --config.model.d_model=64")
assert "are saved" in printed

# %%
LAYERS = "--config.model.num_layers=4 --config.num_steps=80 --config.eval.every_steps=40"
printed = ats(f"train {SMALL} {LAYERS} --workdir=runs/full")
printed = ats(f"train {SMALL} --config=debug:mod {LAYERS} --workdir=runs/mod")

# %% [markdown]
# ## Compare
# Compare validation losses only: in training, the choice of tokens has seen the whole row. These
# two have seen equally many tokens, at unequal cost, with one seed each; docs/guides/depths.md says
# how a fair comparison is made.

# %%
import json


def rows(workdir: str, file: str) -> list[dict]:
  """The rows of one of a run's logs."""
  with open(f"{workdir}/{file}.jsonl") as lines:
    return [json.loads(line) for line in lines]


for name in ("full", "mod"):
  losses = [row["eval/loss"] for row in rows(f"runs/{name}", "metrics") if "eval/loss" in row]
  print(f"{name}: validation loss {losses[-1]:.3f}")

# %% [markdown]
# ## Which way do tokens go?
# `mod/depths` is the share of tokens that went through 0, 1, 2, ... of the layers that skip.
# `mod/agreement` says how often the rule of generation, which does not look ahead, decides as
# training does.

# %%
import matplotlib.pyplot as plt

depths = [row for row in rows("runs/mod", "layers") if "mod/depths" in row]
agreement = [row for row in rows("runs/mod", "metrics") if "mod/agreement" in row]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
share = depths[-1]["mod/depths"]
left.bar(range(len(share)), share)
left.set(xlabel="layers that a token went through", ylabel="share of tokens")
right.plot([row["step"] for row in agreement], [row["mod/agreement"] for row in agreement])
right.set(xlabel="step", ylabel="agreement")
plt.show()
assert abs(sum(share) - 1) < 1e-3
