# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A first run
# This notebook trains a model of one million parameters, stops, goes on, draws the loss and writes
# a sample. It downloads no data: the text is the standard library of this Python.
#
# **Where it runs.** On a CPU it takes a few minutes on two cores.
# - On a machine of your own: install ats_jax first (docs/start/install.md). The first cell then
#   changes nothing. You need Jupyter and matplotlib too: `pip install notebook matplotlib`.
# - On Google Colab: put the wheel (`ats_jax-*.whl`) among the files on the left, or clone the
#   repository and open the notebook from there. The first cell installs it. With a TPU (v5e) as
#   runtime, it takes the extra `tpu` in place of `colab`.
# - On Kaggle: switch the internet on, choose "GPU T4 x2" or a TPU as accelerator, and upload the
#   wheel as a dataset or clone the repository.
#
# **What was tested.** CI executes every cell with few steps on a CPU, with Python 3.12 and 3.13 and
# the packages that Colab publishes. **What was not:** Colab itself, its T4 and its TPUs. Kaggle was
# not either, nor its two T4 and its TPUs, for which pip's choice of packages was not compared with
# what is installed there. The settings below need no bfloat16, which a T4 lacks.

# %%
import glob
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("ats_jax") is None:
  places = ("ats_jax-*.whl", "/kaggle/input/**/ats_jax-*.whl", "../pyproject.toml")
  found = [path for place in places for path in glob.glob(place, recursive=True)]
  assert found, "put the wheel beside this notebook, or open the notebook from a checkout"
  source = ".." if found[0].endswith(".toml") else found[0]
  is_hosted = not {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}.isdisjoint(os.environ)
  has_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
  extra = ("[tpu]" if has_tpu else "[colab]") if is_hosted else ""
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source + extra], check=True)

# %% [markdown]
# On Colab this changes jax, its plugins and flax, and adds what is missing. It changes nothing else
# that is installed, and no restart is needed: nothing here imports jax. (The runtime 2026.07 has a
# numpy that is too old for this jax; there numpy changes too.)
#
# Training runs in a process of its own. It takes the memory of the GPU and gives it back.


# %%
def ats(*words: str) -> str:
  """Run `ats-jax` with these words; show what it prints, and return it."""
  command = [sys.executable, "-m", "ats_jax", *words]
  lines = []
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
  ) as process:
    for line in process.stdout:
      lines.append(line)
      print(line, end="")
  if process.returncode:
    raise RuntimeError(f"`ats-jax {' '.join(words)}` ended with exit code {process.returncode}.")
  return "".join(lines)


WORKDIR = "runs/quickstart"
SETTINGS = []
STEPS = 400
if "ATS_JAX_TOY" in os.environ:  # CI: a smaller model, fewer steps
  SETTINGS = [
    "--config.model.num_layers=2", "--config.model.d_model=64", "--config.data.bpe_vocab_size=400",
    "--config.data.batch_size=8", "--config.optimizer.warmup_steps=5", "--config.log.every_steps=5",
    f"--config.data.paths={os.path.dirname(subprocess.__file__)}/asyncio",
    "--config.data.validation_fraction=0.2", "--config.sample.max_tokens=8",
  ]  # fmt: skip
  STEPS = 40

# %% [markdown]
# ## Train
# `--config=debug` is a config that comes with the package. `--config.section.name=value` changes a
# setting.


# %%
def train(steps: int) -> str:
  """Train to `steps`, or go on to it: the same command does both."""
  return ats(
    "train", "--config=debug", f"--workdir={WORKDIR}", f"--config.num_steps={steps}", *SETTINGS
  )


printed = train(STEPS // 2)

# %% [markdown]
# ## Go on
# The same command goes on from the last checkpoint of the workdir, here with more steps.

# %%
printed = train(STEPS)
assert f"from step {STEPS // 2} of {STEPS}" in printed

# %% [markdown]
# ## The loss
# All that a run measures is in `metrics.jsonl`, a row a line.

# %%
import json


def series(name: str) -> tuple[list[int], list[float]]:
  """The steps and values of one metric."""
  with open(f"{WORKDIR}/metrics.jsonl") as file:
    rows = [json.loads(line) for line in file]
  found = [(row["step"], row[name]) for row in rows if name in row]
  return [step for step, _ in found], [value for _, value in found]


steps, losses = series("train/loss")
assert steps == sorted(set(steps)) and steps[-1] == STEPS, "a step is missing or there twice"
assert losses[-1] < losses[0] - 0.5, f"the loss did not fall: {losses[0]:.2f} to {losses[-1]:.2f}"
assert "jax" not in sys.modules, "jax was imported into the notebook"
print(f"loss {losses[0]:.2f} at step {steps[0]}, {losses[-1]:.2f} at step {steps[-1]}")

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 4))
axis.plot(steps, losses, label="training")
axis.plot(*series("eval/loss"), "o-", label="validation")
axis.axvline(STEPS // 2, color="grey", linestyle=":", label="stopped, and went on")
axis.set(xlabel="step", ylabel="loss (nats per token)")
axis.legend()
plt.show()

# %% [markdown]
# ## A sample
# A model of this size, after so few steps, writes the shape of Python and not its sense.

# %%
sample = ats("generate", f"--workdir={WORKDIR}", "--prompt=def ", "--max_tokens=40")
assert "def " in sample

# %% [markdown]
# ## Two T4, or a TPU of several chips
# All devices of a machine take part without a setting: each has the weights and a share of the rows
# of a step, so that their number divides `data.batch_size`. What each would hold, `plan` says
# anywhere. On a T4, `--config.precision.compute_dtype=auto` multiplies in float16; on a TPU in
# bfloat16. A model too large for one of them is cut by `--config.mesh.fsdp=2`.

# %%
for mesh in ("data=2", "fsdp=2"):
  planned = ats("plan", "--config=debug", f"--config.mesh.{mesh}")
  assert "devices: 2 " in planned
