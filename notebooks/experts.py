# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A look at experts
# A mixture of experts has several feed-forwards in each layer, and a router that sends each token
# to two of them. This notebook trains one beside a dense model, compares their losses, and shows
# how evenly the router spreads the tokens.
#
# Read `quickstart` first; installing is said there. On a CPU this takes about twice as long.
#
# **What was tested.** CI executes every cell with few steps on a CPU, with Python 3.12 and 3.13 and
# the packages that Colab publishes. **What was not:** Colab itself, its T4 and its TPUs.

# %%
import glob
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("ats_jax") is None:
  found = [*glob.glob("ats_jax-*.whl"), *glob.glob("../pyproject.toml")]
  assert found, "put the wheel beside this notebook, or open the notebook from a checkout"
  source = ".." if found[0].endswith(".toml") else found[0]
  extra = "[colab]" if "COLAB_RELEASE_TAG" in os.environ else ""
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source + extra], check=True)

# %%
SETTINGS = []
if "ATS_JAX_TOY" in os.environ:  # CI: smaller models, fewer steps
  SETTINGS = [
    "--config.model.num_layers=2", "--config.model.d_model=64", "--config.data.bpe_vocab_size=400",
    "--config.data.batch_size=8", "--config.optimizer.warmup_steps=5", "--config.log.every_steps=5",
    f"--config.data.paths={os.path.dirname(subprocess.__file__)}/asyncio",
    "--config.data.validation_fraction=0.2", "--config.sample.max_tokens=8",
    "--config.num_steps=20",
  ]  # fmt: skip


def train(variant: str) -> None:
  """Train `debug:variant` in a process of its own, and show what it prints."""
  command = [sys.executable, "-m", "ats_jax", "train", f"--config=debug:{variant}"]
  command += [f"--workdir=runs/{variant}", *SETTINGS]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
  ) as process:
    for line in process.stdout:
      print(line, end="")
  if process.returncode:
    raise RuntimeError(f"the training of {variant} ended with exit code {process.returncode}.")


# %% [markdown]
# ## Train both
# Eight experts, each half as wide as the dense feed-forward, of which a token uses two: a token
# goes through as many parameters as in the dense model, and the model has more of them.

# %%
train("dense")

# %%
train("moe")

# %% [markdown]
# ## Compare
# The same text, the same steps, about the same work for a token. Which one is better after so few
# steps is no proof of anything: one seed each, a small model, a small text.

# %%
import json

import matplotlib.pyplot as plt


def rows(variant: str, file: str) -> list[dict]:
  """The rows of one of a run's logs."""
  with open(f"runs/{variant}/{file}.jsonl") as lines:
    return [json.loads(line) for line in lines]


figure, axis = plt.subplots(figsize=(7, 4))
last = {}
for variant in ("dense", "moe"):
  evaluated = [row for row in rows(variant, "metrics") if "eval/loss" in row]
  trained = [row for row in rows(variant, "metrics") if "train/loss" in row]
  assert trained[-1]["train/loss"] < trained[0]["train/loss"], f"{variant}: the loss did not fall"
  (line,) = axis.plot(
    [row["step"] for row in trained], [row["train/loss"] for row in trained], label=variant
  )
  axis.plot(
    [row["step"] for row in evaluated], [row["eval/loss"] for row in evaluated], "o",
    color=line.get_color(), label=f"{variant}, validation",
  )  # fmt: skip
  last[variant] = evaluated[-1]["eval/loss"]
axis.set(xlabel="step", ylabel="loss (nats per token)")
axis.legend()
plt.show()
print({variant: round(loss, 3) for variant, loss in last.items()})

# %% [markdown]
# ## The load of each expert
# `layers.jsonl` has, for each layer, the share of all choices that fell on each expert. With eight
# experts an even load is 1 / 8 = 0.125. A router that uses few of its experts wastes the others.
# Two things work against that: a bias on the selection (`moe.bias_rate`) and a loss
# (`moe.aux_loss`). docs/guides/experts.md says more.

# %%
loads = [row for row in rows("moe", "layers") if "moe/load" in row]
first, final = loads[0], loads[-1]
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for axis, row in zip(axes, (first, final), strict=True):
  image = axis.imshow(row["moe/load"], vmin=0, vmax=0.5, aspect="auto")
  axis.set(title=f"step {row['step']}", xlabel="expert", ylabel="layer")
figure.colorbar(image, ax=axes, label="load")
plt.show()

# %%
for layer, load in enumerate(final["moe/load"]):
  assert abs(sum(load) - 1) < 1e-3, "shares of the choices sum to 1"
  print(f"layer {layer}: the fullest expert has {max(load) * len(load):.2f} times its even share")
