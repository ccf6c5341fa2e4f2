"""What `mesh.context` must divide, and what it cannot be used with."""

from ats_jax.config.curriculum import LEAST_LENGTH
from ats_jax.config.schema import Config

PROBE_POSITIONS = 256  # of the orchestrator's blocks, where rows are longer


def context(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for rows that cannot be cut into so many parts, and for heads that so many devices
      cannot share.
  """
  ways, tensor = cfg.mesh.context, cfg.mesh.tensor
  if ways == 1:
    return
  if cfg.data.seq_len % ways:
    raise ValueError(
      f"mesh.context={ways} does not divide data.seq_len={cfg.data.seq_len}: the devices along a "
      f"row have equal parts of it. Use a multiple of {ways}, or another mesh.context."
    )
  if cfg.model.num_heads % (ways * tensor):
    raise ValueError(
      f"mesh.context={ways} x mesh.tensor={tensor} does not divide model.num_heads="
      f"{cfg.model.num_heads}: in attention each device has whole rows of some heads. Use a "
      "divisor; mesh.fsdp and mesh.data take devices too."
    )
  asks = cfg.orchestrator.mode != "off"
  if asks and cfg.data.seq_len > PROBE_POSITIONS and PROBE_POSITIONS % ways:
    raise ValueError(
      f"mesh.context={ways} with orchestrator.mode={cfg.orchestrator.mode}: its probe has rows of "
      f"{PROBE_POSITIONS} positions, which it does not divide. Use a power of two, or "
      "orchestrator.mode=off."
    )
  if cfg.data.length_buckets > 1 and LEAST_LENGTH % ways:
    raise ValueError(
      f"data.length_buckets={cfg.data.length_buckets} with mesh.context={ways}: shorter rows are "
      f"multiples of {LEAST_LENGTH}, which it does not divide. Use data.length_buckets=1, or a "
      f"divisor of {LEAST_LENGTH}."
    )
  if cfg.moe.num_experts and cfg.moe.dispatch == "capacity":
    raise ValueError(
      f"mesh.context={ways} with moe.dispatch=capacity: experts have places by whole row, and a "
      "device has a part of it. Set moe.dispatch=dropless, or mesh.context=1."
    )
