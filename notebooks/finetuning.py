# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Fine-tuning with an adapter
# Teach a trained model to answer by training small matrices beside its frozen weights, and take
# these to other tools.
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
# ## A base
# Here it is a short run. In its place, `--init_from=hf://OWNER/NAME` takes a published model
# (not run here, since it is a download).

# %%
printed = ats(f"train {SMALL} --workdir=runs/base --config.num_steps=100")

# %% [markdown]
# ## Conversations
# A line is a conversation. The loss covers what the assistant says, and nothing else.

# %%
import json

with open("runs/chats.jsonl", "w") as file:
  for a in range(12):
    for b in range(12):
      question = {"role": "user", "content": f"Which is larger, {a} or {b}?"}
      answer = {"role": "assistant", "content": f"{max(a, b)} is larger."}
      file.write(json.dumps({"messages": [question, answer]}) + "\n")

# %% [markdown]
# ## Train
# `finetune` chooses the settings for this model and these conversations, and says each and why. At
# the end it answers questions that it was not trained on, with the model before and after.

# %%
printed = ats(
  "finetune --init_from=runs/base --data=runs/chats.jsonl --workdir=runs/tuned "
  "--config.num_epochs=6 --config.optimizer.learning_rate=5e-3 --config.log.progress=False"
)
assert "held-out loss after" in printed

# %% [markdown]
# ## Ask
# In a terminal, `ats-jax chat --workdir=runs/tuned` holds a conversation. A model of this size has
# learned the form of an answer sooner than which number is larger.

# %%
printed = ats(
  "generate --workdir=runs/tuned --step=best --chat --temperature=0 --max_tokens=30 "
  "--prompt='Which is larger, 3 or 9?'"
)

# %% [markdown]
# ## Take it along
# The adapter alone, as peft reads it, or the model with the adapter merged into it.

# %%
printed = ats("bridge export --workdir=runs/tuned --step=best --folder=runs/adapter --format=peft")
printed = ats("bridge export --workdir=runs/tuned --step=best --folder=runs/merged")
size = {
  folder: os.path.getsize(glob(f"runs/{folder}/*.safetensors")[0])
  for folder in ("adapter", "merged")
}
assert size["adapter"] < size["merged"]
print(size)
