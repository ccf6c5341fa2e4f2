# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # From Hugging Face and back
# Write a run as a folder of Hugging Face's, begin another run with such a folder, and write that
# one back. The folder is one that this notebook makes; `hf://OWNER/NAME` in its place is a model of
# the Hub.
#
# **What was tested.** CI executes every cell on a CPU, with Python 3.12 and 3.13 and the packages
# that Colab publishes. **What was not:** Colab itself, its T4 and its TPUs.
# A download, and the folder in `transformers`, were not run here either.

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
printed = ats(f"train {SMALL} --workdir=runs/first --config.num_steps=60")

# %% [markdown]
# ## Out
# The first family that computes the same is chosen: here Llama.

# %%
import json

printed = ats("bridge export --workdir=runs/first --folder=runs/exported")
with open("runs/exported/config.json") as file:
  config = json.load(file)
print(sorted(os.listdir("runs/exported")), config["architectures"])

# %% [markdown]
# With torch and transformers installed, `ats-jax bridge verify --workdir=runs/first
# --folder=runs/exported` compares the logits with those of `transformers`.
#
# ## In
# A folder becomes a workdir, whose model continues a text as the one that it came from.

# %%
printed = ats("bridge import --folder=runs/exported --workdir=runs/imported")
GREEDY = "--prompt='def ' --temperature=0 --max_tokens=24"
before = ats(f"generate --workdir=runs/first {GREEDY}")
after = ats(f"generate --workdir=runs/imported {GREEDY}")
text = lambda printed: printed[printed.index("def ") :]  # behind lines of the log
assert text(before) == text(after)

# %% [markdown]
# ## On, and back
# A run may begin with the folder. The settings of its model must be those of the folder;
# `ats-jax config import runs/exported/config.json --to=my.py` writes them as a config file.

# %%
OTHER = SMALL.replace("--config.data.bpe_vocab_size=400 ", "")  # its tokenizer is the folder's
printed = ats(
  f"train {OTHER} --workdir=runs/second --init_from=runs/exported --config.num_steps=30 "
  "--config.data.tokenizer=runs/exported/tokenizer.json --config.optimizer.learning_rate=1e-3"
)
printed = ats("bridge export --workdir=runs/second --folder=runs/back")
with open("runs/back/config.json") as file:
  assert json.load(file)["architectures"] == config["architectures"]

# %% [markdown]
# Did the 30 steps help? Both on one file:

# %%
for workdir in ("runs/first", "runs/second"):
  printed = ats(f"evaluate --workdir={workdir} --paths={TEXT}/queues.py")
