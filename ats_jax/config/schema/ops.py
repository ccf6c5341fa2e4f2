"""The section `ops`."""

import dataclasses

from ats_jax.config.schema.setting import setting


@dataclasses.dataclass(frozen=True)
class OpsConfig:
  """Which implementation runs."""

  kernels: str = setting(
    "",
    "implementations of ops or of single slots, e.g. 'attention=xla,rms_norm.backward=cuda'; "
    "docs/reference/kernels.md lists them. The rest is the measured best for the device",
    resume="free",
  )
  strict: bool = setting(
    False, "a choice of ours that is not the fast one for this device is an error", resume="free"
  )
