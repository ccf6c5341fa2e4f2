"""The section `eval`."""

import dataclasses

from ats_jax.config.schema.setting import setting


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation on the validation split."""

  every_steps: int = setting(
    0, "steps between evaluations; 0 = only at the end", low=0, resume="free"
  )
  num_batches: int = setting(
    0,
    "batches of data.batch_size rows of the validation split; 0 = all of it once",
    low=0,
    resume="free",
  )
  bigram_baseline: bool = setting(
    False,
    "at the end, print the loss of a Witten-Bell bigram model fitted on the same tokens",
    resume="free",
  )
