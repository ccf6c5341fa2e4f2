"""The section `eval`."""

import dataclasses

from ats_jax.config.schema.setting import Condition, of_flags, setting

HELD_OUT = Condition(
  "data.validation_fraction",
  "data.validation_fraction or data.validation_paths",
  lambda *values: any(values),
  beside=("data.validation_paths",),
)
_EVALUATED = Condition(
  "data.validation_fraction",
  "data.validation_fraction, data.validation_paths or data.validation_sets",
  lambda *values: any(values),
  beside=("data.validation_paths", "data.validation_sets"),
)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation on the validation split."""

  every_steps: int = setting(
    0,
    "steps between evaluations; 0 = only at the end",
    low=0,
    resume="free",
    needs=of_flags(_EVALUATED),
  )
  num_batches: int = setting(
    0,
    "batches of data.batch_size rows of the validation split; 0 = all of it once",
    low=0,
    resume="free",
    needs=of_flags(_EVALUATED),
  )
  bigram_baseline: bool = setting(
    False,
    "at the end, print the loss of a Witten-Bell bigram model fitted on the same tokens",
    resume="free",
    needs=of_flags(HELD_OUT),
  )
