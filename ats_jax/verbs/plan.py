"""What a run would cost, before any device is used."""

import json
from pathlib import Path

from absl import flags

from ats_jax import exits
from ats_jax.config.schema import Config
from ats_jax.config.text import text_of
from ats_jax.config.width import settings_of_width
from ats_jax.metrics.memory import GIB
from ats_jax.planner import describe, expert_axis
from ats_jax.planner.abstract import resolve_without_data
from ats_jax.planner.advice import fit_lines, memory_lines
from ats_jax.planner.budget import budget, parse_law, render_budget
from ats_jax.planner.fit import fit
from ats_jax.planner.hardware import TYPICAL, Hardware, typical, with_format_of, with_kernels_of
from ats_jax.planner.widths import check_widths, render_slopes
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

WIDTHS = """settings for training a wide model at the learning rate of a narrow one, and their check

  ats-jax plan widths --config=b1 --base_width=256
  ats-jax plan widths --config=debug --base_width=64 --widths=64,128,256

The first prints the settings (muP) for the width of the config, as flags. With --widths, small
models are trained for some updates, and the change of their logits is compared; --base_width=0
checks the settings as they are.
"""

PLAN_FLAGS, BUDGET_FLAGS, WIDTHS_FLAGS = (flags.FlagValues() for _ in range(3))
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
  "Without --hardware: precision.compute_dtype=auto is of it, and --fit has its typical rates and "
  f"memory; of {', '.join(TYPICAL)}.",
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


_WIDTHS_CONFIG = cli.ConfigFlag(WIDTHS_FLAGS)
_BASE = flags.DEFINE_integer(
  "base_width",
  0,
  "model.d_model for which the config's learning rate and initialisation are; 0 = for any.",
  lower_bound=0,
  flag_values=WIDTHS_FLAGS,
)
_WIDTHS = flags.DEFINE_list(
  "widths", [], "Values of model.d_model to train at and to compare.", flag_values=WIDTHS_FLAGS
)
_UPDATES = flags.DEFINE_integer(
  "updates", 4, "Updates of each model.", lower_bound=1, flag_values=WIDTHS_FLAGS
)


def main(argv: list[str]) -> None:
  """Print the plan of a config."""
  del argv
  rates = Hardware.load(Path(_HARDWARE.value).expanduser()) if _HARDWARE.value else None
  kind = (rates or typical(_DEVICE.value)).device_kind
  cfg = with_kernels_of(with_format_of(_CONFIG.value, kind), kind)
  if _FIT.value:
    _print_fitted(cfg, rates)
    return
  plan = describe.describe(cfg, _DEVICES.value, rates)
  folded = expert_axis.without_expert_axis(cfg, _DEVICES.value, plan)
  if _JSON.value:
    print(json.dumps(plan | {"without_expert_axis": folded}))
    return
  print(describe.render_plan(plan))
  if folded:
    print("", *expert_axis.render_expert_axis(folded), sep="\n")
  if _MEMORY.value:
    limit = round(_MEMORY.value * GIB)
    print("", *memory_lines(cfg, _DEVICES.value, plan, limit), sep="\n")


def _print_fitted(cfg: Config, rates: Hardware | None) -> None:
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
  found = fit(cfg, _DEVICES.value, limit, rates)
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


def main_widths(argv: list[str]) -> int:
  """Print the settings for a width, or check them."""
  del argv
  cfg, base = _WIDTHS_CONFIG.value, _BASE.value
  if not _WIDTHS.value:
    if not base:
      raise ValueError(
        "plan widths needs --base_width, or --widths to check the settings as they are."
      )
    found = settings_of_width(resolve_without_data(cfg), base)
    print(*(f"--config.{name}={text_of(value)}" for name, value in found.items()), sep="\n")
    return exits.DONE
  widths = [_width(text) for text in _WIDTHS.value]
  slopes = check_widths(cfg, widths, base, updates=_UPDATES.value)
  print(render_slopes(widths, slopes))
  return exits.DONE if all(row.verdict == "steady" for row in slopes) else exits.FAULT


def _width(text: str) -> int:
  try:
    return int(text)
  except ValueError:
    raise ValueError(f"--widths={text}: expected whole numbers, as in 64,128,256.") from None


COMMANDS = {
  "": cli.Command(main, PLAN_FLAGS, PLAN),
  "widths": cli.Command(main_widths, WIDTHS_FLAGS, WIDTHS),
  "budget": cli.Command(main_budget, BUDGET_FLAGS, BUDGET),
}
