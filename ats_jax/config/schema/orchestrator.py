"""The section `orchestrator`."""

import dataclasses
from typing import Any, ClassVar

from ats_jax.config.schema import rules
from ats_jax.config.schema.eval import HELD_OUT
from ats_jax.config.schema.setting import of_flags, setting, when

PROBE_POSITIONS = 256  # of the probe's rows, where those of training are longer


@dataclasses.dataclass(frozen=True)
class OrchestratorConfig:
  """What watches the run and steps in."""

  NEEDS: ClassVar = when("orchestrator.mode", no="off")

  mode: str = setting(
    "off",
    "nothing, or measure and report, or also act",
    choices=("off", "observe", "act"),
  )
  check_interval: int = setting(100, "updates between two looks of the supervisor", low=1)
  probe_share: float = setting(
    0.001,
    "share of the compute that scoring held-out text at each look may take; that text has at most "
    "64 blocks, and at least 1,024 tokens whatever they cost",
    low=1e-6,
    high=1.0,
    resume="free",
  )
  snapshot_interval: int = setting(
    100,
    "least updates between two snapshots to roll back to",
    low=1,
    resume="free",
    needs=[when("orchestrator.mode", "act"), of_flags(when("orchestrator.snapshot_gb"))],
  )
  snapshot_gb: float = setting(
    64.0,
    "host memory of a process that three snapshots may take; past it, or with 0, a rollback goes "
    "to the last checkpoint; comparisons need room for five",
    unit="GiB",
    low=0.0,
    resume="free",
    needs=when("orchestrator.mode", "act"),
  )
  compare_share: float = setting(
    0.25,
    "share of num_steps that comparisons may make in updates: what does not fit in the rest is not "
    "compared; 0 = nothing is compared, and only what is certain is mended",
    low=0.0,
    high=1.0,
    resume="free",
    needs=when("orchestrator.mode", "act"),
  )
  raise_learning_rate: bool = setting(
    False,
    "compare higher learning rates with the schedule's, and keep one that wins; a comparison takes "
    "the time of two intervals",
    resume="free",
    needs=when("orchestrator.mode", "act"),
  )

  patience: int = setting(
    0,
    "evaluations without a lower validation loss after which the run ends, or in mode observe is "
    "advised to; 0 = it never does",
    low=0,
    resume="free",
    needs=[when("eval.every_steps"), when("checkpoint.keep_best"), HELD_OUT],
  )

  def check(self, cfg: Any) -> None:
    """Refuse evaluations whose best is not kept, and a mesh that the probe cannot be cut for."""
    every, saves = cfg.eval.every_steps, cfg.checkpoint.every_steps
    if self.patience and every % saves:
      raise ValueError(
        f"orchestrator.patience={self.patience} needs a checkpoint at each evaluation, so that the "
        f"best is kept: eval.every_steps={every} is no multiple of checkpoint.every_steps={saves}. "
        "Change one of them."
      )
    if self.mode == "off" or cfg.data.seq_len <= PROBE_POSITIONS:
      return
    if PROBE_POSITIONS % (ways := cfg.mesh.context):
      raise ValueError(
        f"mesh.context={ways} with orchestrator.mode={self.mode}: its probe has rows of "
        f"{PROBE_POSITIONS} positions, which it does not divide. Use a power of two, or "
        "orchestrator.mode=off."
      )

  def check_length(self, cfg: Any) -> None:
    """Refuse a run that ends before the first look, or has nothing to roll back to."""
    if self.mode == "off":
      return
    advice = ": nobody would ever look. Use a tenth of the run or less, or orchestrator.mode=off."
    rules.at_most(cfg, "orchestrator.check_interval", "num_steps", advice)
    every, steps = cfg.checkpoint.every_steps, cfg.num_steps
    if self.mode == "act" and self.snapshot_gb == 0.0 and every >= steps:
      raise ValueError(
        f"orchestrator.snapshot_gb=0 and checkpoint.every_steps={every} of num_steps={steps} leave "
        "nothing to roll back to. Allow snapshots, save more often, or use "
        "orchestrator.mode=observe."
      )
