"""Every public setting: type, default, meaning, unit, range. The only place with defaults.

A file a section; this one assembles them.

`configs/*.py` edit these through an ml_collections ConfigDict (`tree.py`); `build.py` turns the
result back into these frozen classes. A rule that joins several settings is in the `check` of a
section that it is about, or in its `check_length` if it needs to know `num_steps`.
"""

import dataclasses
from typing import Any

from ats_jax.config.schema import rules
from ats_jax.config.schema.checkpoint import CheckpointConfig
from ats_jax.config.schema.data import DataConfig
from ats_jax.config.schema.eval import EvalConfig
from ats_jax.config.schema.finetune import FinetuneConfig
from ats_jax.config.schema.log import LogConfig
from ats_jax.config.schema.mesh import MeshConfig
from ats_jax.config.schema.mod import MoDConfig
from ats_jax.config.schema.model import ModelConfig
from ats_jax.config.schema.moe import MoEConfig
from ats_jax.config.schema.ops import OpsConfig
from ats_jax.config.schema.optimizer import OPTIMIZERS, OptimizerConfig
from ats_jax.config.schema.orchestrator import OrchestratorConfig
from ats_jax.config.schema.precision import PrecisionConfig
from ats_jax.config.schema.sample import SampleConfig
from ats_jax.config.schema.setting import of_flags, section, setting, when
from ats_jax.config.schema.step import StepConfig

__all__ = [
  "MAX_SEED",
  "MAX_STEPS",
  "CheckpointConfig",
  "Config",
  "DataConfig",
  "EvalConfig",
  "FinetuneConfig",
  "LogConfig",
  "MeshConfig",
  "MoDConfig",
  "MoEConfig",
  "ModelConfig",
  "OpsConfig",
  "OptimizerConfig",
  "OrchestratorConfig",
  "PrecisionConfig",
  "SampleConfig",
  "StepConfig",
]

MAX_SEED = 2**32 - 1  # jax drops what is above 32 bits: 2**32 would be seed 0 again
MAX_STEPS = 2**31 - 1  # steps are counted in int32 on the device


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  seed: int = setting(0, "of weights, dropout, data order and sampling", low=0, high=MAX_SEED)
  num_steps: int = setting(
    400,
    "optimizer updates",
    low=1,
    high=MAX_STEPS,
    resume="free",
    needs=[of_flags(when("num_epochs", 0.0)), of_flags(when("length", "given"))],
  )
  num_epochs: float = setting(
    0.0,
    "passes over the training rows, in place of num_steps; 0 = num_steps",
    low=0.0,
    resume="free",
  )
  length: str = setting(
    "given",
    "what says when to end: 'given' = num_steps or num_epochs; 'budget' = the tokens with which "
    "`plan budget` finds this model compute-optimal on this text, between the next two; 'flops' = "
    "train_flops; 'phases' = the lengths in data.phases",
    choices=("given", "budget", "flops", "phases"),
    resume="free",
  )
  least_epochs: float = setting(
    0.0,
    "of a budget: at least so many passes over the training rows",
    low=0.0,
    resume="free",
    needs=when("length", "budget"),
  )
  most_epochs: float = setting(
    4.0,
    "of a budget: at most so many; past 4 a repeated token is worth visibly less",
    low=0.0,
    resume="free",
    needs=when("length", "budget"),
  )
  train_flops: float = setting(
    0.0,
    "FLOPs of the whole training, as `plan` counts them for rows of data.seq_len tokens",
    low=0.0,
    resume="free",
    needs=when("length", "flops"),
  )
  compilation_cache: str = setting(
    "auto",
    "folder of compiled programs; 'auto' = ~/.cache/ats_jax/xla, 'off' = none",
    resume="free",
  )
  heartbeat_secs: int = setting(
    30,
    "in a job of several processes, one that gives no sign of life for so long is taken for dead, "
    "and all end",
    unit="s",
    low=1,
    resume="free",
  )
  hang_secs: float = setting(
    300.0,
    "a step in which nothing moves for so long, and ten times as long as any before, hangs: the "
    "stacks of all processes are written, and a job ends with code 1, to be started again. To "
    "compile, save, evaluate or begin may take twelve times as long; 0 = for ever",
    unit="s",
    low=0.0,
    resume="free",
  )
  join_secs: int = setting(
    300,
    "in a job of several processes, each waits so long at its start for the others; then it says "
    "which are missing, and ends",
    unit="s",
    low=1,
    resume="free",
  )
  extensions: tuple[str, ...] = setting(
    (),
    "files or modules of yours that add metric writers, schedules, optimizers, losses, routers, "
    "data formats and orders of rows (docs/guides/extending.md); a workdir keeps them as name#hash",
    resume="free",
  )
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
  mod: MoDConfig = dataclasses.field(default_factory=MoDConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = section(OPTIMIZERS, "adamw")
  finetune: FinetuneConfig = dataclasses.field(default_factory=FinetuneConfig)
  step: StepConfig = dataclasses.field(default_factory=StepConfig)
  precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  ops: OpsConfig = dataclasses.field(default_factory=OpsConfig)
  eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  log: LogConfig = dataclasses.field(default_factory=LogConfig)
  sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)
  orchestrator: OrchestratorConfig = dataclasses.field(default_factory=OrchestratorConfig)

  @property
  def counts_epochs(self) -> bool:
    """Whether `num_steps` is not what the user says, but follows from the data."""
    return self.num_epochs > 0 or self.length != "given"

  def check(self, cfg: Any) -> None:
    """Refuse two lengths of the run, and caches on a store."""
    del cfg
    rules.is_local(self, "compilation_cache")
    if self.length != "given" and self.num_epochs:
      most = " and most_epochs" if self.length == "budget" else ""
      raise ValueError(
        f"num_epochs={self.num_epochs} and length={self.length} both say when to end. Use "
        f"num_epochs=0{most}, or length=given."
      )
    if self.length == "budget":
      advice = ". Raise most_epochs or lower least_epochs."
      rules.at_most(self, "least_epochs", "most_epochs", advice)
      if not self.most_epochs:
        raise ValueError("most_epochs=0 trains nothing: use a positive number of passes, e.g. 4.")
    if self.length == "flops" and not self.train_flops:
      raise ValueError("length=flops needs train_flops, e.g. train_flops=1e18.")
