"""Which run something belongs to."""

import dataclasses
import hashlib
import json

from ats_jax.config.names import default_of, flatten, settings
from ats_jax.config.schema import Config


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """What a run and all of its checkpoints have in common.

  Attributes:
    run: drawn at random when its workdir was first claimed.
    settings: a hash of those that may not change on resume; "" = any.
  """

  run: str
  settings: str


def fixed_settings_hash(cfg: Config) -> str:
  """A hash of the settings of a run that may not change on resume, as its user wrote them.

  Those at their default are left out, as `differences` leaves them out: a setting that a later
  version adds changes no hash. Changes by an orchestrator are left out too.
  """
  fixed, flat = {}, flatten(cfg)
  for name, field in settings(cfg).items():
    if field.metadata["resume"] == "fixed" and flat[name] != default_of(name, field):
      fixed[name] = float(flat[name]) if field.type is float else flat[name]  # 1 and 1.0 are equal
  return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]
