"""The section `ops`."""

import dataclasses

from ats_jax.config.schema.setting import Table, setting


@dataclasses.dataclass(frozen=True)
class OpsConfig:
  """Which implementation runs."""

  kernels: Table[str] = setting(
    Table(),
    "implementations of ops or of single slots, e.g. attention=xla,rms_norm.backward=cuda "
    "(docs/reference/kernels.md); a slot's goes before its op's. The rest is the measured best for "
    "the device",
    resume="free",
  )
  strict: bool = setting(
    False, "a choice of ours that is not the fast one for this device is an error", resume="free"
  )
