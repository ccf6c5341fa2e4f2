"""What the hosts of an exchange of tokens must divide, and what they are for."""

from ats_jax.config.schema import Config


def exchange(cfg: Config) -> None:
  """A rule of `config.validate`.

  Raises:
    ValueError: for hosts that do not divide the devices that experts are spread over, and for
      `moe.exchange_hosts` where it does nothing.
  """
  hosts, how, ways = cfg.moe.exchange_hosts, cfg.moe.exchange, cfg.mesh.expert
  if not hosts:
    return
  if how != "hierarchical":
    raise ValueError(
      f"moe.exchange_hosts={hosts} does nothing with moe.exchange={how}, which knows no hosts. Set "
      "moe.exchange=hierarchical, or moe.exchange_hosts=0."
    )
  if ways > 1 and ways % hosts:
    raise ValueError(
      f"moe.exchange_hosts={hosts} does not divide mesh.expert={ways}: each host has as many of "
      "the devices that experts are spread over. Use a divisor, or 0 for one host a process."
    )
