"""The section `mesh`."""

import dataclasses
from typing import Any

from ats_jax.config.schema import rules
from ats_jax.config.schema.setting import Condition, of_flags, setting, when

_SHARDED = Condition(
  "mesh.fsdp",
  "mesh.fsdp, mesh.expert or mesh.context above 1",
  lambda *ways: max(ways) > 1,
  beside=("mesh.expert", "mesh.context"),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How many ways each mesh axis is split."""

  stage: int = setting(
    1,
    "stages of a pipeline that the layers are cut into; divides accum_steps",
    low=1,
    resume="free",
  )
  stage_rounds: int = setting(
    1,
    "groups of layers that a stage has; micro-batches go round so often, and stages idle less",
    low=1,
    resume="free",
    needs=when("mesh.stage", above=1),
  )
  data: int = setting(-1, "copies of the weights; -1 = all devices that are left", resume="free")
  fsdp: int = setting(1, "ways weights and moments are sharded", low=1, resume="free")
  expert: int = setting(
    1, "ways experts are spread; the batch is split over it too", low=1, resume="free"
  )
  context: int = setting(
    1,
    "ways the positions of a row are cut; context x tensor divides num_heads",
    low=1,
    resume="free",
  )
  tensor: int = setting(
    1, "ways heads, hidden width and vocabulary are sharded", low=1, resume="free"
  )
  zero: int = setting(
    3,
    "what `fsdp`, `expert` and `context` shard: 1 = moments, 2 = gradients too, 3 = weights too",
    low=1,
    high=3,
    resume="free",
    needs=of_flags(_SHARDED),
  )
  keep_gathered: bool = setting(
    False,
    "keep gathered weights until the backward pass: sent once, not twice; more memory",
    resume="free",
    needs=when("mesh.zero", 3),
  )
  copy_engines: bool = setting(
    False,
    "sharded weights, their gradients and what attention swaps with context go by the GPUs' copy "
    "engines, not by NCCL; one process",
    resume="free",
    needs=when("mesh.zero", 3),
  )
  compress_gradients: str = setting(
    "none",
    "how gradients are sent between copies of the weights: 'none' as they are, 'fp8' in 8 bits, "
    "with error feedback; not timed between hosts yet",
    choices=("none", "fp8"),
    resume="free",
    needs=when("mesh.data", no=1),
  )

  def check(self, cfg: Any) -> None:
    """Refuse axes that do not divide what they cut, and ways to send weights that there are not."""
    for name in ("model.num_heads", "model.num_kv_heads"):
      rules.divides(cfg, "mesh.tensor", name, "Heads are sharded over 'tensor'.")
    if self.data != -1 and self.data < 1:
      raise ValueError(f"mesh.data={self.data}: use a positive number, or -1 for all that is left.")
    self._check_rows(cfg)
    if self.compress_gradients != "none" and self.stage > 1:
      raise ValueError(
        f"mesh.compress_gradients={self.compress_gradients} with mesh.stage={self.stage}: a "
        "pipeline makes the gradients of all replicas in one pass, which sums them. Set "
        "mesh.compress_gradients=none, or mesh.stage=1 with mesh.fsdp."
      )
    self._check_gathered()

  def _check_rows(self, cfg: Any) -> None:
    ways, tensor, heads = self.context, self.tensor, cfg.model.num_heads
    if ways == 1:
      return
    if cfg.data.seq_len % ways:
      raise ValueError(
        f"mesh.context={ways} does not divide data.seq_len={cfg.data.seq_len}: the devices along a "
        f"row have equal parts of it. Use a multiple of {ways}, or another mesh.context."
      )
    if heads % (ways * tensor):
      raise ValueError(
        f"mesh.context={ways} x mesh.tensor={tensor} does not divide model.num_heads={heads}: in "
        "attention each device has whole rows of some heads. Use a divisor; mesh.fsdp and "
        "mesh.data take devices too."
      )
    if cfg.moe.num_experts and cfg.moe.dispatch == "capacity":
      raise ValueError(
        f"mesh.context={ways} with moe.dispatch=capacity: experts have places by whole row, and a "
        "device has a part of it. Set moe.dispatch=dropless, or mesh.context=1."
      )

  def _check_gathered(self) -> None:
    idle = {"fsdp": self.fsdp * self.expert * self.context == 1, "stage": self.stage > 1}
    asked = [name for name in ("keep_gathered", "copy_engines") if getattr(self, name)]
    if asked and any(idle.values()):
      name = next(name for name, is_idle in idle.items() if is_idle)
      raise ValueError(
        f"mesh.{asked[0]}=true does nothing with mesh.{name}={getattr(self, name)}: it is for "
        f"weights that are sharded and that no pipeline gathers. Set mesh.{asked[0]}=false."
      )
