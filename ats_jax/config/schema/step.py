"""The section `step`."""

import dataclasses
from typing import Any

from ats_jax.config.schema import rules
from ats_jax.config.schema.loss import LOSSES, LossConfig
from ats_jax.config.schema.setting import Table, section, setting, when


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """One update: its loss and how it is computed."""

  accum_steps: int = setting(
    1, "micro-batches per update; divides data.batch_size", low=1, resume="free"
  )
  remat: str = setting(
    "none",
    "what the backward pass recomputes: 'none' keeps all, 'full' recomputes each block, 'dots' "
    "keeps matmul outputs, 'names' keeps the named ones (docs/internals/architecture.md), "
    "'qkv' all that attention takes and gives, 'attention' what its kernel gives",
    choices=("none", "full", "dots", "names", "qkv", "attention"),
    resume="free",
  )
  remat_stages: str = setting(
    "full",
    "what a stage of a pipeline keeps of each micro-batch, as remat: 'full' its input alone; remat "
    "says what its layers keep of one while they are computed again",
    choices=("full", "dots", "names", "qkv", "attention"),
    resume="free",
    needs=when("mesh.stage", above=1),
  )
  scan_unroll: int = setting(
    0,
    "blocks per iteration of the scan over layers; 0 = on a GPU all of them, up to 32 (of a "
    "pipeline those of a turn of a stage); 1 elsewhere, and with deterministic kernels "
    "(docs/lab/log.md)",
    low=0,
    resume="free",
  )
  compiler_options: Table[str] = setting(
    Table(),
    "options of XLA for the train step, e.g. xla_gpu_autotune_level=1; they go before those that "
    "the device gets anyway (logged)",
    resume="free",
  )
  loss_chunk_tokens: int = setting(
    8192, "tokens whose logits exist at one time, over all devices", low=1, resume="free"
  )
  loss: LossConfig = section(LOSSES, "cross_entropy")
  z_loss: float = setting(0.0, "weight of mean(logsumexp(logits)^2)", low=0.0)
  label_smoothing: float = setting(
    0.0, "share of the target spread over the vocabulary", low=0.0, high=0.9
  )

  def check(self, cfg: Any) -> None:
    """Refuse micro-batches of no whole number of rows."""
    advice = "A micro-batch is a whole number of rows; change one of them."
    rules.divides(cfg, "step.accum_steps", "data.batch_size", advice)
