"""Measurements behind the planner's figures.

python -m ats_jax.planner mod [--config=FILE] [--steps=10]   what skipping layers saves of a step
python -m ats_jax.planner models                             write the tables of docs/models.md
"""

from pathlib import Path

from absl import flags

from ats_jax import runtime
from ats_jax.config import from_config_dict
from ats_jax.planner.mod_savings import default_config, report
from ats_jax.planner.models import update

_CONFIG = runtime.define_config_flag()
_STEPS = flags.DEFINE_integer(
  "steps", 10, "Timed steps of each program.", lower_bound=1, allow_override=True
)


def _mod() -> None:
  cfg = from_config_dict(_CONFIG.value) if _CONFIG.value else default_config()
  runtime.configure(cfg)
  for line in report(cfg, _STEPS.value):
    print(line, flush=True)


def _models() -> None:
  path = Path(__file__).parents[2] / "docs" / "models.md"
  path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
  print(f"wrote {path}")


_COMMANDS = {"mod": _mod, "models": _models}


def main(argv: list[str]) -> None:
  """Run a command."""
  _COMMANDS[argv[1]]()


if __name__ == "__main__":
  runtime.run(main, commands=tuple(_COMMANDS))
