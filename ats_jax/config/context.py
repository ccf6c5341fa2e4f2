"""What lengths of rows the ways that rows are cut must divide."""

from ats_jax.config.curriculum import LEAST_LENGTH
from ats_jax.config.schema import Config


def context(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for rows of several lengths, which so many devices cannot share.
  """
  if cfg.data.length_buckets == 1:
    return
  for cut in cfg.mesh.cuts():
    if LEAST_LENGTH % cut.ways:
      raise ValueError(
        f"data.length_buckets={cfg.data.length_buckets} with {cut.words}: shorter rows are "
        f"multiples of {LEAST_LENGTH}, which it does not divide. Use data.length_buckets=1, or a "
        f"divisor of {LEAST_LENGTH}."
      )
