"""The section `moe.exchange`: how tokens reach experts on other devices."""

import dataclasses
from typing import Any

from ats_jax.config.schema.setting import Kinds, setting

EXCHANGES = Kinds(
  "moe.exchange",
  "how tokens reach experts on other devices (mesh.expert, dispatch=dropless): all of them go to "
  "all devices, or each once to each host of its experts, and there to all devices",
  resume="free",
)


@dataclasses.dataclass(frozen=True)
class Exchange:
  """What every exchange has."""

  name: str = EXCHANGES.tag("allgather")
  factor: float = setting(
    1.5,
    "room for rows in the exchange, over what a device receives on average; the rest takes further "
    "passes (moe/overflow), so that none is dropped",
    low=1.0,
    resume="free",
  )


@EXCHANGES.register
@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
  """All tokens go to all devices."""


@EXCHANGES.register
@dataclasses.dataclass(frozen=True)
class Hierarchical(Exchange):
  """Each token goes once to each host of its experts, and there to all devices."""

  name: str = EXCHANGES.tag("hierarchical")
  hosts: int = setting(
    0,
    "hosts that mesh.expert is spread over; 0 = as many as there are processes along it",
    low=0,
    resume="free",
  )

  def check(self, cfg: Any) -> None:
    """Refuse hosts that do not divide the devices that experts are spread over."""
    ways = cfg.mesh.expert
    if self.hosts and ways > 1 and ways % self.hosts:
      raise ValueError(
        f"moe.exchange.hosts={self.hosts} does not divide mesh.expert={ways}: each host has as "
        "many of the devices that experts are spread over. Use a divisor, or 0 for one host a "
        "process."
      )
