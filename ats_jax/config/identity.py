"""Which run something belongs to."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ats_jax.config.names import default_of, flatten, settings
from ats_jax.config.schema import Config

# Of the settings that may not change: raised when one that could not may. A hash of another
# selection says nothing about this one.
SELECTION = 2


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """What a run and all of its checkpoints have in common.

  Attributes:
    run: drawn at random when its workdir was first claimed.
    settings: `fixed_settings_hash`; "" = any.
  """

  run: str
  settings: str

  def has(self, saved: Mapping[str, Any]) -> bool:
    """Whether a saved identity, as a dict, is this one as far as the two can be compared."""
    of = lambda settings: str(settings).rpartition("-")[0]
    settings = saved.get("settings")
    comparable = self.settings and of(settings) == of(self.settings)
    return saved.get("run") == self.run and (not comparable or settings == self.settings)


def fixed_settings_hash(cfg: Config) -> str:
  """A hash of the settings of a run that may not change on resume, as its user wrote them.

  It begins with `SELECTION`. Those at their default are left out, as `differences` leaves them out:
  a setting that a later version adds changes no hash. Changes by an orchestrator are left out too.
  """
  fixed, flat = {}, flatten(cfg)
  for name, field in settings(cfg).items():
    if field.metadata["resume"] == "fixed" and flat[name] != default_of(name, field):
      fixed[name] = float(flat[name]) if field.type is float else flat[name]  # 1 and 1.0 are equal
  digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]
  return f"{SELECTION}-{digest}"
