"""What a run would cost, before any device is used."""

import json
from pathlib import Path

from absl import flags

from ats_jax.metrics.memory import GIB
from ats_jax.planner import describe, expert_axis
from ats_jax.planner.advice import fit_lines, memory_lines
from ats_jax.planner.budget import budget, parse_law, render_budget
from ats_jax.planner.fit import fit
from ats_jax.planner.hardware import TYPICAL, Hardware, typical
from ats_jax.verbs import cli

PLAN = """parameters, FLOPs and memory of a config on a mesh of any size, from shapes alone

  ats-jax plan --config=b1
  ats-jax plan --config=b7:moe --devices=64 --config.mesh.fsdp=8 \\
    --config.mesh.expert=2 --config.mesh.tensor=4
  ats-jax plan --config=b1 --hardware=hardware.json

  ats-jax plan --config=llama_7b --devices=8 --memory=74
  ats-jax plan --config=llama_7b --fit --devices=8 --device=H100

--hardware is a file of `ats-jax check_env --measure`: the plan then says what a step takes at least
on such devices and links. With --memory it says whether the run fits, and what would help if not.
--fit picks mesh, step.remat and step.accum_steps that fit and are fastest by these rates, or by
typical ones of --device; it prints what it looked at, and the plan of its pick.
"""
BUDGET = """how many tokens, epochs and hours, and what more of them would buy

  ats-jax plan budget --config=b1 --unique_tokens=5e9
  ats-jax plan budget --config=b1 --flops=1e21 --tokens_per_sec=60000

The budget is one of --tokens, --flops and --gpu_hours; without one it is what the config trains on.
"""

PLAN_FLAGS, BUDGET_FLAGS = flags.FlagValues(), flags.FlagValues()
_CONFIG = cli.ConfigFlag(PLAN_FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print JSON.", flag_values=PLAN_FLAGS)
_DEVICES = flags.DEFINE_integer(
  "devices",
  0,
  "Devices that share the run; 0 = as few as config.mesh needs.",
  lower_bound=0,
  flag_values=PLAN_FLAGS,
)
_HARDWARE = flags.DEFINE_string(
  "hardware", None, "File of rates that `check_env --measure` wrote.", flag_values=PLAN_FLAGS
)
_FIT = flags.DEFINE_bool(
  "fit", False, "Pick mesh, remat and accumulation; needs --devices.", flag_values=PLAN_FLAGS
)
_DEVICE = flags.DEFINE_string(
  "device",
  "H100",
  f"For --fit without --hardware: typical rates and memory of {', '.join(TYPICAL)}.",
  flag_values=PLAN_FLAGS,
)
_MEMORY = flags.DEFINE_float(
  "memory",
  0,
  "GiB of a device that the run can have; 0 = that of --device with --fit, else not asked.",
  lower_bound=0,
  flag_values=PLAN_FLAGS,
)

_BUDGET_CONFIG = cli.ConfigFlag(BUDGET_FLAGS)
_BUDGET_JSON = flags.DEFINE_bool("json", False, "Print JSON.", flag_values=BUDGET_FLAGS)
_AMOUNTS = tuple(
  flags.DEFINE_float(name, 0, text, flag_values=BUDGET_FLAGS)
  for name, text in {
    "tokens": "Training tokens.",
    "flops": "Training FLOPs, causal attention included.",
    "gpu_hours": "Hours of one device; needs --tokens_per_sec.",
    "unique_tokens": "Tokens of the data; 0 = none is seen twice.",
    "tokens_per_sec": "Speed of one device, measured; 0 = unknown.",
  }.items()
)
_LAW = flags.DEFINE_string(
  "law", "besiroglu", "besiroglu, hoffmann, or numbers E,A,B,alpha,beta.", flag_values=BUDGET_FLAGS
)


def main(argv: list[str]) -> None:
  """Print the plan of a config."""
  del argv
  rates = Hardware.load(Path(_HARDWARE.value).expanduser()) if _HARDWARE.value else None
  if _FIT.value:
    _print_fitted(rates)
    return
  plan = describe.describe(_CONFIG.value, _DEVICES.value, rates)
  folded = expert_axis.without_expert_axis(_CONFIG.value, _DEVICES.value, plan)
  if _JSON.value:
    print(json.dumps(plan | {"without_expert_axis": folded}))
    return
  print(describe.render_plan(plan))
  if folded:
    print("", *expert_axis.render_expert_axis(folded), sep="\n")
  if _MEMORY.value:
    limit = round(_MEMORY.value * GIB)
    print("", *memory_lines(_CONFIG.value, _DEVICES.value, plan, limit), sep="\n")


def _print_fitted(rates: Hardware | None) -> None:
  if not _DEVICES.value:
    raise ValueError("--fit needs --devices: how many share the run, such as --devices=8.")
  rates = rates or typical(_DEVICE.value)
  known = [row.gib for row in TYPICAL.values() if row.kind == rates.device_kind]
  if not (_MEMORY.value or known):
    raise ValueError(
      f"--fit: the memory of {rates.device_kind!r} is not known. Say how many GiB of a device the "
      "run can have: --memory."
    )
  limit = round((_MEMORY.value or known[0]) * GIB)
  found = fit(_CONFIG.value, _DEVICES.value, limit, rates)
  if _JSON.value:
    candidates = [candidate._asdict() for candidate in found.considered]
    picked = found.pick and found.pick._asdict()
    print(json.dumps({"pick": picked, "considered": candidates, "plan": found.plan}))
  else:
    print(*fit_lines(found), "", describe.render_plan(found.plan), sep="\n")
  if found.pick is None:
    raise ValueError(f"nothing fits {_DEVICES.value} devices of {limit / GIB:,.1f} GiB.")


def main_budget(argv: list[str]) -> None:
  """Print the budget of a config."""
  del argv
  amounts = {flag.name: flag.value for flag in _AMOUNTS}
  plan = budget(_BUDGET_CONFIG.value, **amounts, law=parse_law(_LAW.value))
  print(json.dumps(plan) if _BUDGET_JSON.value else render_budget(plan))


COMMANDS = {
  "": cli.Command(main, PLAN_FLAGS, PLAN),
  "budget": cli.Command(main_budget, BUDGET_FLAGS, BUDGET),
}
