"""What the ways that rows are cut must divide, and what they cannot be used with."""

from ats_jax.config.schema import Config
from ats_jax.config.schema.row_order import LEAST_LENGTH

PROBE_POSITIONS = 256  # of the orchestrator's blocks, where rows are longer


def context(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for rows that cannot be cut into so many parts, and for heads that so many devices
      cannot share.
  """
  ways, tensor = cfg.mesh.context, cfg.mesh.tensor
  if cfg.mesh.shard_residuals:
    cut = f"mesh.shard_residuals with mesh.context={ways} x mesh.tensor={tensor} = {ways * tensor}"
    _positions(cfg, ways * tensor, cut, "mesh.shard_residuals=false")
  if ways == 1:
    return
  _positions(cfg, ways, f"mesh.context={ways}", "another mesh.context")
  if cfg.mesh.context_ring:
    cut = f"mesh.context_ring with 2 x mesh.context={ways} = {2 * ways} chunks a row"
    _positions(cfg, 2 * ways, cut, "mesh.context_ring=false")
  elif cfg.model.num_heads % (ways * tensor):
    raise ValueError(
      f"mesh.context={ways} x mesh.tensor={tensor} does not divide model.num_heads="
      f"{cfg.model.num_heads}: in attention each device has whole rows of some heads. Use a "
      "divisor, or mesh.context_ring=true; mesh.fsdp and mesh.data take devices too."
    )
  if cfg.moe.num_experts and cfg.moe.dispatch == "capacity":
    raise ValueError(
      f"mesh.context={ways} with moe.dispatch=capacity: experts have places by whole row, and a "
      "device has a part of it. Set moe.dispatch=dropless, or mesh.context=1."
    )


def _positions(cfg: Config, ways: int, cut: str, instead: str) -> None:
  """Refuse rows that so many devices cannot share; `cut` names the settings that ask for it."""
  if cfg.data.seq_len % ways:
    raise ValueError(
      f"{cut} does not divide data.seq_len={cfg.data.seq_len}: the devices along a "
      f"row have equal parts of it. Use a multiple of {ways}, or {instead}."
    )
  asks = cfg.orchestrator.mode != "off"
  if asks and cfg.data.seq_len > PROBE_POSITIONS and PROBE_POSITIONS % ways:
    raise ValueError(
      f"{cut} with orchestrator.mode={cfg.orchestrator.mode}: its probe has rows of "
      f"{PROBE_POSITIONS} positions, which it does not divide. Use a power of two, or "
      "orchestrator.mode=off."
    )
  if cfg.data.order.num_lengths > 1 and LEAST_LENGTH % ways:
    raise ValueError(
      f"data.order={cfg.data.order.name} with {cut}: shorter rows are multiples of {LEAST_LENGTH}, "
      f"which it does not divide. Use data.order=shuffled, or a divisor of {LEAST_LENGTH}."
    )
