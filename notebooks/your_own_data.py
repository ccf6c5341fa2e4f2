# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Your own data
# Are all files read, and read as you expect? What will be trained on? Ask before you train.
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
# ## A folder
# Put yours in place of this one: files of plain text are a document each, lines of JSON too. Two of
# these lines are broken.

# %%
import json
import shutil

shutil.copytree(
  TEXT, "runs/texts", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
)
with open("runs/texts/notes.jsonl", "w") as file:
  for number in range(200):
    file.write(
      json.dumps({"text": f"Note {number}: the square of {number} is {number**2}."}) + "\n"
    )
  file.write('{"text": "this line has no end\n')
  file.write('{"content": "this one has another field"}\n')

# %% [markdown]
# ## What is wrong with it?
# Each malformed record, by file and line. The exit code is 1 if there is any. A training leaves
# them out and says so; with `data.strict=true` it stops at the first.

# %%
printed = ats("data validate --config.data.paths=runs/texts", expected=1)
assert "notes.jsonl:201" in printed and "notes.jsonl:202" in printed

# %% [markdown]
# ## What is in it?
# Documents, tokens and lengths of both splits, and a row as the run reads it: token by token, with
# its weight in the loss.

# %%
MINE = SMALL.replace(TEXT, "runs/texts")
printed = ats(f"data stats {MINE}")

# %%
printed = ats(f"data explain --row=0 {MINE}")

# %% [markdown]
# ## Is each token seen once?
# `audit` follows the rows of an epoch, on several hosts and with a resume on the way.

# %%
printed = ats(f"data audit {MINE}")

# %% [markdown]
# ## Train on it
# The tokenizer is made from the text, and lies in the workdir beside the weights. A mixture gives
# parts of the text weights of their own: docs/guides/data.md.

# %%
printed = ats(f"train {MINE} --workdir=runs/mine --config.num_steps=60")
