"""What settings of a pipeline need."""

from ats_jax.config.schema import Config


def stages(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for `mesh.stage_rounds` or `step.remat_stages` without a pipeline.
  """
  if cfg.mesh.stage > 1:
    return
  rounds, kept = cfg.mesh.stage_rounds, cfg.step.remat_stages
  if rounds > 1:
    raise ValueError(
      f"mesh.stage_rounds={rounds} does nothing with mesh.stage=1: it is how often micro-batches "
      "go round the stages of a pipeline. Set mesh.stage, or mesh.stage_rounds=1."
    )
  if kept != "full":
    raise ValueError(
      f"step.remat_stages={kept} does nothing with mesh.stage=1: it is what a stage of a pipeline "
      "keeps of each micro-batch. Set mesh.stage, or step.remat_stages=full; what layers keep is "
      "step.remat."
    )
