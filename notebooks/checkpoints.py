# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Checkpoints and resume
# Kill a run, go on, and get the same bits as from a run that nobody killed. Then go back to an
# older checkpoint.
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
RUN = f"{SMALL} --config.num_steps=80 --config.checkpoint.every_steps=20 --config.log.every_steps=5"
printed = ats(f"train {RUN} --workdir=runs/whole")

# %% [markdown]
# ## Kill it
# As a power cut does: nothing is saved at the end. (Ctrl-C, or the interrupt of a notebook, saves.)

# %%
import shutil

shutil.rmtree("runs/killed", ignore_errors=True)  # of this cell, executed before
command = [sys.executable, "-m", "ats_jax", "train", *shlex.split(f"{RUN} --workdir=runs/killed")]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
  for line in process.stdout:
    print(line, end="")
    if line.split()[:2] == ["step", "55"]:
      process.kill()
      break

# %% [markdown]
# ## Go on
# The same command goes on from the newest checkpoint and makes the lost steps again.

# %%
printed = ats(f"train {RUN} --workdir=runs/killed --config.log.level=info")
assert "resuming runs/killed from step" in printed

# %%
import json


def losses(workdir: str) -> dict[int, float]:
  """Step -> loss."""
  with open(f"{workdir}/metrics.jsonl") as lines:
    return {r["step"]: r["train/loss"] for r in map(json.loads, lines) if "train/loss" in r}


assert losses("runs/killed") == losses("runs/whole"), "the two runs differ"
print(f"{len(losses('runs/killed'))} losses, each equal in all bits")

# %% [markdown]
# ## Another run
# A workdir is one run: a setting that would make it another one is refused, with exit code 2.

# %%
OTHER = "--config.optimizer.learning_rate=1e-3"
printed = ats(f"train {RUN} --workdir=runs/killed {OTHER}", expected=2)

# %% [markdown]
# ## Go back
# `--resume_step` goes on from an older checkpoint; later ones are set aside. Other verbs take a
# checkpoint by `--step`.

# %%
print(sorted(os.listdir("runs/killed/checkpoints")))
printed = ats(f"train {RUN} --workdir=runs/killed --resume_step=60 --config.log.level=info")
assert "from step 60 of 80" in printed
printed = ats("evaluate --workdir=runs/killed --step=60")
