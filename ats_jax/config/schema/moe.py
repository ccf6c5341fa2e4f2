"""The section `moe`."""

import dataclasses
from typing import Any, ClassVar

from ats_jax.config.schema import rules
from ats_jax.config.schema.exchange import EXCHANGES, Exchange
from ats_jax.config.schema.setting import section, setting, when
from ats_jax.extensions import routers

# A router is `(resolved config, numerics, rngs) -> ats_jax.model.router.Router`.
routers.late("ats_jax.model.router:Router", "linear")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
  """Mixture of experts: several feed-forwards in a layer, of which each token uses a few."""

  NEEDS: ClassVar = when("moe.num_experts")

  num_experts: int = setting(
    0, "routed experts of a layer; 0 = no mixture of experts", low=0, high=2**16
  )
  top_k: int = setting(2, "experts that a token goes to", low=1)
  d_ff: int = setting(0, "hidden width of an expert; 0 = model.d_ff", low=0)
  num_shared: int = setting(0, "experts of the same width that every token goes to", low=0)
  every: int = setting(1, "every n-th layer has experts, the n-th first; 1 = all", low=1)
  dense_first: int = setting(0, "layers without experts at the bottom", low=0)
  dense_last: int = setting(0, "layers without experts at the top", low=0)
  router: str = setting("linear", "what makes a token's logits of experts", choices=routers)
  score: str = setting(
    "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid")
  )
  router_bias: bool = setting(False, "train an offset of each expert's logit")
  expert_bias: bool = setting(False, "add trained vectors to an expert's gate, up and output")
  renormalize: bool = setting(
    True,
    "divide the scores of a token's experts by their sum; with top_k = 1 never, as the router "
    "would have no gradient",
  )
  route_scale: float = setting(1.0, "multiplies the weights of the experts", low=0.0)
  temperature: float = setting(1.0, "divides the router's logits", low=0.01, high=100.0)
  noise: float = setting(
    0.0,
    "standard deviation of what is added to the logits when training chooses experts",
    low=0.0,
    training=True,
  )
  num_groups: int = setting(
    1, "groups of neighbouring experts, of which a token uses top_groups; 1 = no limit", low=1
  )
  top_groups: int = setting(
    1, "groups that a token may use", low=1, needs=when("moe.num_groups", above=1)
  )
  group_score: str = setting(
    "top2",
    "what a group counts by: the sum of its two best scores, or its best",
    choices=("top2", "max"),
    needs=when("moe.num_groups", above=1),
  )
  null_experts: int = setting(
    0, "experts that do nothing: the compute of a token depends on how many it draws", low=0
  )
  spare_experts: int = setting(
    0,
    "idle slots that surgery can fill with new experts, each as large as an expert (weights, "
    "gradients, moments)",
    low=0,
  )
  dispatch: str = setting(
    "dropless",
    "'dropless' computes every choice; 'capacity' gives an expert room for capacity_factor times "
    "its fair share of each row and drops the rest (training only)",
    choices=("dropless", "capacity"),
    training=True,
  )
  capacity_factor: float = setting(
    1.25,
    "room of an expert over its fair share",
    low=0.1,
    needs=when("moe.dispatch", "capacity"),
    training=True,
  )
  drop_policy: str = setting(
    "position",
    "who keeps a place in a full expert: the first in the row, or the highest weight",
    choices=("position", "weight"),
    needs=when("moe.dispatch", "capacity"),
    training=True,
  )
  exchange: Exchange = section(EXCHANGES, "allgather")
  aux_loss: float = setting(
    0.001, "weight of the Switch balance loss over the global batch", low=0.0, training=True
  )
  sequence_aux_loss: float = setting(
    0.0, "weight of the balance loss within each row", low=0.0, training=True
  )
  z_loss: float = setting(
    0.001, "weight of mean(logsumexp(router logits)^2)", low=0.0, training=True
  )
  bias_update: str = setting(
    "proportional",
    "how the selection bias follows the load: not, by the error's sign, or by the error",
    choices=("none", "sign", "proportional"),
    training=True,
  )
  bias_on: str = setting(
    "logits",
    "what the selection bias is added to: logits, or scores as published (DeepSeek-V3)",
    choices=("logits", "scores"),
  )
  bias_rate: float = setting(
    0.005,
    "step of the selection bias, in what it is added to; on logits up to 0.15 while a router is "
    "collapsed",
    low=0.0,
    high=1.0,
    needs=when("moe.bias_update", no="none"),
    training=True,
  )
  bias_freeze: float = setting(
    0.05,
    "last share of the run over which bias_rate falls to 0",
    low=0.0,
    high=1.0,
    needs=when("moe.bias_update", no="none"),
    training=True,
  )

  def check(self, cfg: Any) -> None:
    """Refuse experts that no layer or device can have, and choices among them that cannot be."""
    if not self.num_experts:
      return
    advice = ". A token goes to each expert at most once; lower top_k or add experts."
    rules.at_most(cfg, "moe.top_k", "moe.num_experts", advice)
    layers = cfg.model.num_layers
    if self.dense_first + self.dense_last + self.every > layers:
      raise ValueError(
        f"no layer has experts: moe.dense_first={self.dense_first}, "
        f"moe.dense_last={self.dense_last} and moe.every={self.every} leave none of "
        f"model.num_layers={layers}. Lower one of them, or set moe.num_experts=0."
      )
    if (self.num_experts + self.spare_experts) % cfg.mesh.expert:
      spare = f" + moe.spare_experts={self.spare_experts}" if self.spare_experts else ""
      raise ValueError(
        f"mesh.expert={cfg.mesh.expert} does not divide moe.num_experts={self.num_experts}{spare}. "
        "Each device holds the same number of experts; change one of them."
      )
    if self.num_groups > 1:
      self._check_groups(cfg)
    if self.null_experts and self.dispatch == "capacity":
      raise ValueError(
        f"moe.null_experts={self.null_experts} needs moe.dispatch=dropless: in capacity mode every "
        "expert computes all its places, so that nothing is saved. Set moe.null_experts=0, or "
        "moe.dispatch=dropless."
      )

  def _check_groups(self, cfg: Any) -> None:
    for name in ("moe.num_experts", "moe.spare_experts"):
      rules.divides(cfg, "moe.num_groups", name, "Groups are of one size; change one of them.")
    rules.at_most(cfg, "moe.top_groups", "moe.num_groups", ". Lower top_groups.")
    if self.top_k > (reach := self.top_groups * self.num_experts // self.num_groups):
      raise ValueError(
        f"moe.top_k={self.top_k} exceeds the {reach} experts of moe.top_groups={self.top_groups} "
        "groups. Raise top_groups or lower top_k."
      )
    if self.null_experts:
      raise ValueError(
        f"moe.null_experts={self.null_experts} belong to no group: use them with moe.num_groups=1."
      )
