"""Abstract runs: shapes, dtypes and shardings on a mesh of any size; no device is used."""

import math

import jax

from ats_jax.config.build import resolve
from ats_jax.config.schema import Config
from ats_jax.data.tokens.tokenizer import ByteTokenizer
from ats_jax.model.numerics import numerics
from ats_jax.sharding.mesh import mesh_sizes
from ats_jax.sharding.rules import MESH_AXES, spec
from ats_jax.step import program
from ats_jax.step.optimizers import build_optimizer
from ats_jax.step.program import init_state
from ats_jax.step.state import TrainState


def resolve_without_data(cfg: Config) -> Config:
  """Resolve a config with the vocabulary size that its settings give, without reading data.

  Raises:
    ValueError: if the settings do not give it, or if `resolve` refuses the config.
  """
  known_sizes = {"bytes": ByteTokenizer.vocab_size, "bpe": cfg.data.bpe_vocab_size}
  size = known_sizes.get(cfg.data.tokenizer, cfg.model.vocab_size)
  if not size:
    raise ValueError(
      f"model.vocab_size=0 stands for the size of data.tokenizer={cfg.data.tokenizer}, which is "
      "not read here. Set model.vocab_size."
    )
  return resolve(cfg, size)


def abstract_mesh(cfg: Config, devices: int = 0) -> jax.sharding.AbstractMesh:
  """The mesh that `cfg.mesh` asks for, without its devices.

  Args:
    cfg: the config.
    devices: the number of devices; 0 = as few as the mesh needs.

  Raises:
    ValueError: if the sizes of the mesh do not fit the devices or the batch (`mesh_sizes`).
  """
  asked = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES}
  fewest = math.prod(n for n in asked.values() if n != -1)
  sizes = mesh_sizes(cfg, devices or fewest)
  explicit = (jax.sharding.AxisType.Explicit,) * len(MESH_AXES)
  return jax.sharding.AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=explicit)


def abstract_state(cfg: Config) -> TrainState:
  """The state of step 0 on the current (abstract) mesh; `cfg` is resolved.

  Raises:
    ValueError: if the mesh does not divide a dimension of the weights.
  """
  # Which implementation runs changes no shape.
  num = numerics(cfg)
  return jax.eval_shape(lambda: init_state(cfg, num, build_optimizer(cfg, "cpu")))


def batch_on_mesh(*shape: int) -> dict[str, jax.ShapeDtypeStruct]:
  """An abstract batch of shape [..., rows, seq] on the current (abstract) mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  axes = spec(*[None] * (len(shape) - 2), "batch", "seq")
  return program.abstract_batch(shape, jax.sharding.NamedSharding(mesh, axes))


def device_bytes(tree: object) -> int:
  """Bytes that one device holds of a tree of (abstract) arrays."""
  return sum(map(_shard_bytes, jax.tree.leaves(tree)))


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
  shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
  return math.prod(shape) * leaf.dtype.itemsize
