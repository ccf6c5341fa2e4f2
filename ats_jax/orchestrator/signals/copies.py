"""Are the copies of the weights on several devices equal? Nothing but a fault makes them differ.

Every device adds the bits of its own copies, so the checksums of the step, which are read from one
device, do not show it.
"""

from collections.abc import Sequence

import jax
import numpy as np

from ats_jax.metrics.host_copy import start_copy
from ats_jax.model.decoder import Decoder
from ats_jax.model.param import trainable
from ats_jax.orchestrator.signals.interval import Finding
from ats_jax.sharding.apply import mesh_axes
from ats_jax.step import tensors


class Copies:
  """Compares copies along the mesh axes that share the tokens: their updates are of common sums.

  Copies that are unequal at the first look have never been equal, so devices round differently,
  as processes may that chose other kernels for the optimizer's matmuls. That is no fault.
  """

  def __init__(self, names: Sequence[str]):
    """Take the names of the tensors. Call it under the mesh."""
    mesh, along = jax.sharding.get_mesh(), (*mesh_axes("batch"), *mesh_axes("seq"))
    self._names, self._devices = names, mesh.devices.ravel().tolist()
    self._were_equal = False
    self._exist = any(mesh.shape[axis] > 1 for axis in along)
    self._compare = jax.jit(lambda model: tensors.odd_copies(trainable(model), copied_along=along))

  def begin(self, model: Decoder) -> jax.Array | None:
    """Begin to compare; what comes of it is on its way to the host. None = there are no copies."""
    if not self._exist:
      return None
    marks = self._compare(model)
    start_copy(marks)
    return marks

  def faults(self, marks: jax.Array | None) -> tuple[Finding, ...]:
    """What `begin` found; waits for it."""
    if marks is None:
      return ()
    places = np.asarray(marks)
    odd = np.flatnonzero(places)
    self._were_equal |= not odd.size
    if not odd.size or not self._were_equal:
      return ()
    device = self._devices[places[odd[0]] - 1]
    more = f" and of {odd.size - 1:,} more tensors" if odd.size > 1 else ""
    reason = (
      f"the copies of {self._names[odd[0]]}{more} are not equal: that of {device} (process "
      f"{device.process_index}) is not the usual one"
    )
    return (Finding("state", reason),)
