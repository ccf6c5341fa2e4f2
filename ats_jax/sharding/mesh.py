"""The device mesh with its plan, and host batches -> global arrays on it."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ats_jax.config.schema import Config
from ats_jax.config.schema.exchange import Hierarchical
from ats_jax.sharding.apply import mesh_axes
from ats_jax.sharding.rules import MESH_AXES, PLAN_OF_ZERO_STAGE, ZERO_AXES, spec, use_plan

ONE_HOST = 8  # devices of a host, where a mesh has none that could tell


def make_mesh(cfg: Config, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
  """Build the mesh `cfg.mesh` asks for over all devices (explicit axes).

  Raises:
    ValueError: as `mesh_sizes`; or for `mesh.copy_engines` with devices of several processes.
  """
  devices = devices or jax.devices()
  processes = len({device.process_index for device in devices})
  if cfg.mesh.copy_engines and processes > 1:
    raise ValueError(
      f"mesh.copy_engines=true with the devices of {processes} processes: copies go from device to "
      "device inside one process. Start one process, or set mesh.copy_engines=false."
    )
  sizes = mesh_sizes(cfg, len(devices))
  return jax.make_mesh(tuple(sizes.values()), MESH_AXES, devices=devices)


@contextlib.contextmanager
def on_mesh(cfg: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Iterator[None]:
  """Enter a mesh with the sharding plan of a config (`plan_of`)."""
  if isinstance(mesh, jax.sharding.AbstractMesh):
    of_mesh = jax.sharding.use_abstract_mesh(mesh)
  else:
    of_mesh = jax.set_mesh(mesh)
  with of_mesh, plan_of(cfg, mesh):
    yield


def plan_of(
  cfg: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> contextlib.AbstractContextManager[None]:
  """Enter the sharding plan of a resolved config on a mesh; a vocabulary is never padded.

  Raises:
    ValueError: if the hosts share the axis of experts unequally, with `moe.exchange=hierarchical`.
  """
  sizes = mesh.shape
  with use_plan("default"):
    ways = math.prod(sizes[axis] for axis in mesh_axes("vocab"))
  divides = cfg.model.vocab_size % ways == 0
  experts = cfg.moe.num_experts + cfg.moe.spare_experts
  return use_plan(
    PLAN_OF_ZERO_STAGE[cfg.mesh.zero],
    whole_vocabulary=not divides,
    whole_matrices=experts % math.prod(sizes[axis] for axis in ZERO_AXES) == 0,
    hosts=expert_hosts(cfg, mesh) if isinstance(cfg.moe.exchange, Hierarchical) else 1,
    copy_engines=cfg.mesh.copy_engines,
  )


def expert_hosts(cfg: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
  """The number of hosts that the mesh axis of experts is spread over.

  `moe.exchange.hosts`, or as many as there are processes along the axis. Of a mesh without devices
  a host has up to ONE_HOST neighbours.

  Raises:
    ValueError: as `hosts_along`.
  """
  exchange = cfg.moe.exchange
  assert isinstance(exchange, Hierarchical)
  ways, asked = mesh.shape["expert"], exchange.hosts
  axis = mesh.axis_names.index("expert")
  if asked and ways > 1:
    assert ways % asked == 0  # `config.validate`
    return asked
  if isinstance(mesh, jax.sharding.AbstractMesh):
    inner = math.prod(mesh.axis_sizes[axis + 1 :])
    return ways // math.gcd(ways, max(1, ONE_HOST // inner))
  host_of = np.array([device.process_index for device in mesh.devices.flat])
  return hosts_along(np.moveaxis(host_of.reshape(mesh.axis_sizes), axis, -1).reshape(-1, ways))


def hosts_along(host_of: np.ndarray) -> int:
  """The number of hosts along a mesh axis, each with one block of neighbours of one size.

  Args:
    host_of: int [lines, devices], the host of each device along the axis.

  Raises:
    ValueError: if hosts have blocks of different sizes, or devices that are no neighbours.
  """
  hosts = len(np.unique(host_of[0]))
  for line in host_of:
    blocks = line.reshape(hosts, -1) if len(line) % hosts == 0 else line[None]
    if len(np.unique(line)) != hosts or (blocks != blocks[:, :1]).any():
      raise ValueError(
        f"moe.exchange=hierarchical: devices along mesh.expert={len(line)} are on the hosts "
        f"{line.tolist()}, elsewhere on {hosts}. Each host needs as many of them, side by side. "
        "Choose another mesh.expert, set moe.exchange.hosts, or use moe.exchange=allgather."
      )
  return hosts


def mesh_sizes(cfg: Config, num_devices: int) -> dict[str, int]:
  """The size of each mesh axis.

  Raises:
    ValueError: if the sizes do not multiply to the number of devices, or do not divide the batch
      and its micro-batches.
  """
  sizes = {a: getattr(cfg.mesh, a) for a in MESH_AXES}
  if sizes["data"] == -1:
    others = {a: n for a, n in sizes.items() if a != "data"}
    rest = math.prod(others.values())
    if num_devices % rest:
      product = " x ".join(f"mesh.{a}={n}" for a, n in others.items())
      here, hint = f"{num_devices} devices", f"Choose sizes whose product divides {num_devices}."
      if num_devices == 1:
        simulated = f"XLA_FLAGS=--xla_force_host_platform_device_count={rest}"
        here, hint = (
          "one device",
          f"Leave them at 1; on a CPU, {simulated} simulates {rest} devices.",
        )
      raise ValueError(f"{product} = {rest} does not divide the {here}. {hint}")
    sizes["data"] = num_devices // rest
  if math.prod(sizes.values()) != num_devices:
    raise ValueError(
      f"mesh {'x'.join(map(str, sizes.values()))} ({', '.join(MESH_AXES)}) needs "
      f"{math.prod(sizes.values())} devices, there are {num_devices}. "
      f"Change {', '.join(f'mesh.{a}' for a in MESH_AXES)}; mesh.data=-1 takes all that are left."
    )
  ways = [sizes[a] for a in mesh_axes("batch")]
  shards, micro = math.prod(ways), cfg.data.batch_size // cfg.step.accum_steps
  if micro % shards:
    product = " x ".join(f"mesh.{a}={n}" for a, n in zip(mesh_axes("batch"), ways, strict=True))
    raise ValueError(
      f"data.batch_size={cfg.data.batch_size} / step.accum_steps={cfg.step.accum_steps} = {micro} "
      f"rows a micro-batch do not divide over {product} = {shards} shards. "
      f"Use a multiple of {shards * cfg.step.accum_steps}."
    )
  stages, accum = sizes["stage"], cfg.step.accum_steps
  if accum % stages:
    from ats_jax.sharding.pipeline import bubble

    more = -(-4 * accum // stages) * stages if accum > 1 else 4 * stages
    idle = bubble(more, stages, cfg.mesh.stage_rounds)
    raise ValueError(
      f"mesh.stage={stages} does not divide step.accum_steps={accum}, the micro-batches that go "
      f"through the pipeline: the stages share them before and behind it. Use a multiple of "
      f"{stages}; of a step with {more}, a stage would idle {idle:.0%}."
    )
  return sizes


def batch_sharding(mesh: jax.sharding.Mesh, ndim: int) -> jax.sharding.NamedSharding:
  """Sharding of a `[accum, batch, seq]` (ndim 3) or `[batch, seq]` (ndim 2) array."""
  axes = ("batch", "seq") if ndim == 2 else (None, "batch", "seq")
  return jax.sharding.NamedSharding(mesh, spec(*axes))


def local_rows(mesh: jax.sharding.Mesh, micro: int) -> np.ndarray:
  """Return the sorted rows of a micro-batch of `micro` rows that this process's devices hold."""
  sharding = jax.sharding.NamedSharding(mesh, spec("batch"))
  blocks = sharding.addressable_devices_indices_map((micro,)).values()
  return np.unique(np.concatenate([np.arange(micro)[b[0]] for b in blocks if b]))


def to_global(batch: Mapping[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
  """Make global arrays from this process's rows (`local_rows`) of each array.

  Rows are whole here; of one that is cut along its positions a device takes its own.
  """
  place = jax.make_array_from_process_local_data
  ways = math.prod(mesh.shape[axis] for axis in mesh_axes("batch"))
  here = len(local_rows(mesh, ways))  # of so many blocks of rows
  shape_of = lambda v: (*v.shape[:-2], v.shape[-2] // here * ways, v.shape[-1])
  return {k: place(batch_sharding(mesh, v.ndim), v, shape_of(v)) for k, v in batch.items()}
