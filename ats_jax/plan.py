r"""What a run would cost, before any device is used: parameters, FLOPs, memory, tokens.

python -m ats_jax plan --config=configs/b7.py:moe --devices=64 --config.mesh.fsdp=8 \
  --config.mesh.expert=2 --config.mesh.tensor=4 [--json]
python -m ats_jax plan budget --config=configs/b1.py [--tokens=20e9 | --flops=1e21 | \
  --gpu_hours=500] [--unique_tokens=5e9] [--tokens_per_sec=60000] [--law=besiroglu] [--json]
"""

import json

from absl import flags

from ats_jax import cli
from ats_jax.config import from_config_dict
from ats_jax.config.extend import load_extensions
from ats_jax.planner import describe
from ats_jax.planner.budget import budget, parse_law, render

_CONFIG = cli.define_config_flag()
_DEVICES = flags.DEFINE_integer(
  "devices", 0, "Devices that share the run; 0 = as few as config.mesh needs.", lower_bound=0
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON.")
_AMOUNTS = (
  flags.DEFINE_float("tokens", 0, "Budget: training tokens."),
  flags.DEFINE_float("flops", 0, "Budget: training FLOPs."),
  flags.DEFINE_float("gpu_hours", 0, "Budget: hours of one device; needs --tokens_per_sec."),
  flags.DEFINE_float("unique_tokens", 0, "Budget: tokens of the data; 0 = none is seen twice."),
  flags.DEFINE_float("tokens_per_sec", 0, "Budget: speed of one device, measured; 0 = unknown."),
)
_LAW = flags.DEFINE_string(
  "law", "besiroglu", "Budget: besiroglu, hoffmann, or numbers E,A,B,alpha,beta."
)


def main(argv: list[str]) -> None:
  """Print the plan of a config, or its budget."""
  config = cli.require(_CONFIG.value, "config", "configs/b7.py:moe")
  cfg = load_extensions(from_config_dict(config))
  of_other = (_DEVICES,) if argv[1:] else (*_AMOUNTS, _LAW)
  for flag in of_other:
    if flag.present:
      where = "without" if argv[1:] else "with"
      raise ValueError(f"--{flag.name} has a meaning only {where} the command budget.")
  if argv[1:]:
    amounts = {flag.name: flag.value for flag in _AMOUNTS}
    plan, text = budget(cfg, **amounts, law=parse_law(_LAW.value)), render
  else:
    plan, text = describe.describe(cfg, _DEVICES.value), describe.render
  print(json.dumps(plan) if _JSON.value else text(plan))


if __name__ == "__main__":
  cli.run(main, commands=("", "budget"))
