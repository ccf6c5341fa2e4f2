"""What compression of gradients between replicas cannot be used with."""

from ats_jax.config.schema import Config


def replicas(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for `mesh.compress_gradients` with a pipeline.
  """
  asked = cfg.mesh.compress_gradients
  if asked == "none":
    return
  if cfg.mesh.stage > 1:
    raise ValueError(
      f"mesh.compress_gradients={asked} with mesh.stage={cfg.mesh.stage}: a pipeline makes the "
      "gradients of all replicas in one pass, which sums them. Set mesh.compress_gradients=none, "
      "or mesh.stage=1 with mesh.fsdp."
    )
