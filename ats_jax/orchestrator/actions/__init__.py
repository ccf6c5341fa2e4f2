"""What can be done to a run: a class each, known by its name once its file is named here."""

from ats_jax.orchestrator.actions.base import KINDS, Action, from_json
from ats_jax.orchestrator.actions.experts import (
  AddExpert,
  MergeExperts,
  PruneExpert,
  RecycleExpert,
  ScaleTemperature,
  SetPenalty,
)
from ats_jax.orchestrator.actions.loop import CorrectStep, Repeat, Rollback, SaveCheckpoint, Stop
from ats_jax.orchestrator.actions.scalars import (
  SetBalance,
  SetExpertDropout,
  SetLearningRateScale,
  SetWeightDecay,
)
from ats_jax.orchestrator.actions.settings import (
  ChangeSettings,
  DecayNow,
  EndRun,
  FullPrecision,
  GrowBatch,
)

__all__ = [
  "KINDS",
  "Action",
  "AddExpert",
  "ChangeSettings",
  "CorrectStep",
  "DecayNow",
  "EndRun",
  "FullPrecision",
  "GrowBatch",
  "MergeExperts",
  "PruneExpert",
  "RecycleExpert",
  "Repeat",
  "Rollback",
  "SaveCheckpoint",
  "ScaleTemperature",
  "SetBalance",
  "SetExpertDropout",
  "SetLearningRateScale",
  "SetPenalty",
  "SetWeightDecay",
  "Stop",
  "from_json",
]
