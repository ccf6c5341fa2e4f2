# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Generation
# Continue a text, choose how tokens are drawn, continue many at once, and do it from Python.
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
printed = ats(f"train {SMALL} --workdir=runs/writer --config.num_steps=100")

# %% [markdown]
# ## One text
# At temperature 0 the likeliest token is taken each time, and the text is always the same. Above
# it, the same seed gives the same text.

# %%
ONE = "generate --workdir=runs/writer --max_tokens=40 --prompt='    def '"
greedy = ats(f"{ONE} --temperature=0")

# %%
drawn = ats(f"{ONE} --temperature=0.8 --top_p=0.9 --seed=1")

# %% [markdown]
# ## Many texts
# A text a line; the answers are lines of JSON in the same order.

# %%
import json

with open("runs/prompts.txt", "w") as file:
  file.write("import \nclass \nasync def \n")
printed = ats("generate --workdir=runs/writer --prompts=runs/prompts.txt --max_tokens=16")
answers = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
assert len(answers) == 3

# %% [markdown]
# ## From Python
# `ats_jax.api` has the same as functions. It computes in its process, so this script has one of its
# own; in a program of yours, these are its lines. `Engine` takes questions while it answers others,
# and reports tokens as they are drawn.

# %%
SCRIPT = """
from ats_jax import api

with api.Engine("runs/writer", rows=2) as engine:
  for prompt in ("import ", "class ", "async def "):
    print(engine.submit(prompt, max_tokens=12, temperature=0), repr(prompt))
  texts = {}
  for event in engine.events():
    texts[event.id] = texts.get(event.id, "") + event.text
    if event.finished:
      print(event.id, event.finished, repr(texts[event.id]))
"""
done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, stdout=subprocess.PIPE, text=True)
print(done.stdout)
assert done.stdout.count("length") + done.stdout.count("end") == 3
