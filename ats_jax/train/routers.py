"""Routers of one run in the model of another."""

import jax
import numpy as np
from absl import logging

from ats_jax.checkpoint.layout import named_arrays
from ats_jax.config.schema import Config
from ats_jax.inference.load import load_run
from ats_jax.model.decoder import Decoder
from ats_jax.model.layout import stacks
from ats_jax.store import paths


def with_routers(cfg: Config, model: Decoder, folder: str) -> Decoder:
  """The same model with the routers of a run, by layer, with what balances them.

  Args:
    cfg: the resolved config of the model.
    model: with experts.
    folder: workdir of the run.

  Raises:
    ValueError: if their routers are not alike, or for several processes.
  """
  if jax.process_count() > 1:
    raise ValueError(
      "--init_router is for a run of one process. Begin with one, and go on with several."
    )
  is_router = lambda name: "router" in name.split("/")
  with load_run(paths.parse(folder)) as run:
    found = named_arrays(run.model, stacks=stacks(run.program.cfg))
    theirs = {
      name: np.asarray(part.leaf if part.layer is None else part.leaf[part.layer])
      for name, part in found.items()
      if is_router(name)
    }
  ours = {n: part for n, part in named_arrays(model, stacks=stacks(cfg)).items() if is_router(n)}
  shapes = [{name: part.shape for name, part in of.items()} for of in (ours, theirs)]
  if shapes[0] != shapes[1] or not ours:
    other = sorted(shapes[0].items() ^ shapes[1].items())
    what = ", ".join(f"{name} {list(shape)}" for name, shape in other[:4])
    raise ValueError(
      f"--init_router={folder}: its routers are not those of this model ({what or 'none'} in one "
      "of them alone). Both need the same layers, width and experts."
    )
  leaves = jax.tree.leaves(model)
  for number in {part.number for part in ours.values()}:
    old = leaves[number]
    of_leaf = {part.layer: theirs[name] for name, part in ours.items() if part.number == number}
    is_whole = None in of_leaf
    new = of_leaf[None] if is_whole else np.stack([of_leaf[i] for i in range(len(of_leaf))])
    leaves[number] = jax.device_put(new.astype(old.dtype), old.sharding)
  logging.info("%d arrays of routers are those of %s", len(theirs), folder)
  return jax.tree.unflatten(jax.tree.structure(model), leaves)
