# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Model and attention
# Where do the parameters of a model lie, what do the kinds of attention cost, and how much of the
# text before a token does a model use? This notebook plans four models that differ in their
# attention alone, trains them for a moment, and evaluates them on texts cut to several lengths.
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
# ## Parameters and cache
# `plan` counts without training. In generation, keys and values of all tokens so far are kept: that
# cache, not the weights, limits how many texts fit. It shrinks with fewer heads of keys and values,
# which several queries share (grouped-query attention), and with latents, from which they are made
# again (multi-head latent attention). A window limits what a query sees, not the parameters.

# %%
import json

KINDS = {
  "every query its own": "--config.model.num_kv_heads=4",
  "four queries share": "--config.model.num_kv_heads=1",
  "latent": "--config.model.kv_latent_dim=16 --config.model.latent_rope_dim=8 "
  "--config.model.num_kv_heads=4",
  "window of 8 tokens": "--config.model.num_kv_heads=4 --config.model.window=8",
}
plans = {}
for name, flags in KINDS.items():
  plans[name] = json.loads(ats(f"plan --json {SMALL} {flags}").splitlines()[-1])
for name, plan in plans.items():
  attention = plan["parameters"]["parts"]["attention"]["total"]
  cache = plan["kv_cache_bytes"]["token"]
  print(f"{name}: {attention:,} parameters of attention, {cache:,.0f} bytes of cache a token")
own, shared, latent, _ = (plan["kv_cache_bytes"]["token"] for plan in plans.values())
assert shared == own / 4 and latent < own / 2

# %% [markdown]
# ## Train each
# With one seed and 80 updates, differences between their losses say nothing yet. `ats-jax compare`
# trains variants with several seeds at equal cost, and gives intervals.

# %%
for number, flags in enumerate(KINDS.values()):
  ats(
    f"train {SMALL} {flags} --config.num_steps=80 --config.eval.every_steps=40 "
    f"--workdir=runs/attention-{number}"
  )

# %% [markdown]
# ## How far back it looks
# Attention does not cross the ends of documents. The same text, cut into documents of so many
# characters, shows what context is worth: the first tokens of a document have none. (Cuts fall
# within words too, which makes short pieces harder besides.)

# %%
LENGTHS = (8, 32, 128, 512)
with open(f"{TEXT}/tasks.py") as file:
  text = file.read()
for length in LENGTHS:
  pieces = [text[at : at + length] for at in range(0, len(text) - length, length)]
  with open(f"runs/cut{length}.jsonl", "w") as file:
    file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces)
paths = ",".join(f"cut{length}=runs/cut{length}.jsonl" for length in LENGTHS)
losses = {}
for number, name in enumerate(KINDS):
  printed = ats(f"evaluate --json --workdir=runs/attention-{number} --paths={paths}")
  scores = json.loads(printed.splitlines()[-1])
  losses[name] = [scores[f"eval/cut{length}/loss"] for length in LENGTHS]

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
for name, values in losses.items():
  axes.plot(LENGTHS, values, marker="o", label=name)
axes.set(xscale="log", xlabel="characters of a document", ylabel="loss in nats a token")
axes.legend()
plt.show()
assert all(values[0] > values[-1] for values in losses.values())
