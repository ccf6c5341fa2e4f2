"""The section `mesh`."""

import dataclasses

from ats_jax.config.schema.setting import setting, when


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
    "ways the positions of a row are cut; context x tensor divides num_heads, but for context_ring",
    low=1,
    resume="free",
  )
  context_ring: bool = setting(
    False,
    "along `context`, hand keys and values round a ring, not swap heads: no limit by heads",
    resume="free",
    needs=when("mesh.context", above=1),
  )
  tensor: int = setting(
    1, "ways heads, hidden width and vocabulary are sharded", low=1, resume="free"
  )
  shard_residuals: bool = setting(
    False,
    "cut positions between sub-layers over `tensor`: less memory, a little slower",
    resume="free",
    needs=when("mesh.tensor", above=1),
  )
  zero: int = setting(
    3,
    "what `fsdp`, `expert` and `context` shard: 1 = moments, 2 = gradients too, 3 = weights too",
    low=1,
    high=3,
    resume="free",
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
