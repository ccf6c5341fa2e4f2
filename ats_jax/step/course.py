"""How far a run is, for the rows of its log: rows and tokens read, phase, clipped gradients."""

import dataclasses
from collections.abc import Mapping

from ats_jax.config.schema import Config
from ats_jax.step.schedule import phase


@dataclasses.dataclass(frozen=True)
class Course:
  """The steps and rows of one start of a run, whose batch size may have been another before it.

  Attributes:
    cfg: the resolved config.
    first_step: number of updates done at the start.
    first_row: the first training row that those have not read.
  """

  cfg: Config
  first_step: int = 0
  first_row: int = 0

  def row(self, step: int) -> int:
    """The first training row that the updates up to `step` have not read."""
    return self.first_row + (step - self.first_step) * self.cfg.data.batch_size

  def metrics(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
    """Metrics of update `step` (1-based) from those of the step itself.

    Returns:
      `progress/tokens` and `progress/share`, of those of the whole run; `progress/phase`, that
      of `schedule.phase`; `train/clipped` (0 or 1), if gradients are clipped.
    """
    cfg, limit = self.cfg, self.cfg.optimizer.grad_clip
    metrics = {
      "progress/tokens": float(self.row(step) * cfg.data.seq_len),
      "progress/share": self.row(step) / self.row(max(cfg.num_steps, step)),
      "progress/phase": float(phase(cfg, step)),
    }
    if limit:
      metrics["train/clipped"] = float(values["train/grad_norm"] > limit)
    return metrics
