"""The section `checkpoint`."""

import dataclasses

from ats_jax.config.schema.setting import setting


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What is kept on disk."""

  every_steps: int = setting(
    200, "steps between checkpoints; the last step is always saved", low=1, resume="free"
  )
  keep: int = setting(2, "newest checkpoints kept", low=1, resume="free")
  keep_best: bool = setting(
    False, "keep the one with the lowest validation loss as well", resume="free"
  )
  asynchronous: bool = setting(True, "write in the background", resume="free")
