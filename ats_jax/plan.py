"""What a run would cost, before any device is used: parameters, FLOPs, memory.

python -m ats_jax.plan --config=configs/b7.py:moe --devices=64 --config.mesh.fsdp=8 \
  --config.mesh.expert=8 [--json]
"""

import json

from absl import flags

from ats_jax import runtime
from ats_jax.config import from_config_dict
from ats_jax.planner.describe import describe, render

_CONFIG = runtime.define_config_flag()
_DEVICES = flags.DEFINE_integer(
  "devices", 0, "Devices that share the run; 0 = as few as config.mesh needs.", lower_bound=0
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON.")


def main(argv: list[str]) -> None:
  """Print the plan of a config."""
  del argv
  cfg = from_config_dict(runtime.require(_CONFIG.value, "config", "configs/b7.py:moe"))
  plan = describe(cfg, _DEVICES.value)
  print(json.dumps(plan) if _JSON.value else render(plan))


if __name__ == "__main__":
  runtime.run(main)
