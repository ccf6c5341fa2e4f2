"""The section `checkpoint`."""

import dataclasses
from typing import Any

from ats_jax.config.schema import rules
from ats_jax.config.schema.eval import HELD_OUT
from ats_jax.config.schema.setting import of_flags, setting, when


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What is kept on disk."""

  every_steps: int = setting(
    200, "steps between checkpoints; the last step is always saved", low=1, resume="free"
  )
  keep: int = setting(2, "newest checkpoints kept", low=1, resume="free")
  keep_best: bool = setting(
    False,
    "keep the one with the lowest validation loss as well",
    resume="free",
    needs=[of_flags(when("eval.every_steps")), of_flags(HELD_OUT)],
  )
  local_every: int = setting(
    0,
    "steps between snapshots in local_dir, which are used if they are later than checkpoints; 0 = "
    "none",
    low=0,
    resume="free",
  )
  local_dir: str = setting(
    "",
    "folder on each machine's own disk or in its memory, e.g. /dev/shm/ats or $TMPDIR/ats",
    resume="free",
    needs=when("checkpoint.local_every"),
  )
  asynchronous: bool = setting(True, "write in the background", resume="free")

  def check(self, cfg: Any) -> None:
    """Refuse snapshots without a folder, or with one on a store; a best one without a loss."""
    if self.keep_best and not (cfg.data.validation_fraction or cfg.data.validation_paths):
      raise ValueError(
        "checkpoint.keep_best=true needs a validation loss, and no text is held out. Set "
        "data.validation_paths or data.validation_fraction above 0, or leave keep_best at false."
      )
    rules.is_local(cfg, "checkpoint.local_dir")
    if self.local_every and not self.local_dir:
      raise ValueError(
        f"checkpoint.local_every={self.local_every} needs a folder for its snapshots. Set "
        "checkpoint.local_dir, or checkpoint.local_every=0."
      )
