"""What the optimizer can do by the phases of `data.mixture`."""

from ats_jax.config import mixture
from ats_jax.config.schema import Config


def phases(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for rates or moments by phases that there are not, or of unknown beginning.
  """
  data, given = cfg.data, mixture.rates(cfg.optimizer.phases)
  found = mixture.phases(data.mixture, mixture.sources(data.paths))
  resets = cfg.optimizer.phase_moments == "reset"
  if given and len(given) != len(found):
    raise ValueError(
      f"optimizer.phases={cfg.optimizer.phases!r} has {len(given)} rates, data.mixture "
      f"{len(found)} phases. Give one for each."
    )
  if resets and len(found) < 2:
    raise ValueError(
      f"optimizer.phase_moments=reset, but data.mixture={data.mixture!r} has no second phase. Add "
      "one, or leave optimizer.phase_moments at keep."
    )
  name = "optimizer.phases" if given else "optimizer.phase_moments=reset"
  if (given or resets) and any(phase.unit == "epochs" for phase in found[:-1]):
    raise ValueError(
      f"{name} needs to know when each phase of data.mixture begins, so their lengths must be in "
      "steps or tokens. A phase in epochs can be the last one only."
    )
  for phase, rate in zip(found[:-1], given, strict=False):
    steps = mixture.steps_of(phase, data.batch_size, data.seq_len, 0)
    if rate.warmup > steps:
      raise ValueError(
        f"optimizer.phases: {rate.warmup} steps of warm-up exceed a phase of {steps} steps. "
        "Shorten the warm-up, or lengthen the phase in data.mixture."
      )
