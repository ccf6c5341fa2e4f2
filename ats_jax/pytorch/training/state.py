"""The state of a run between PyTorch and JAX: one format of checkpoints serves both."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from ats_jax.checkpoint import layout
from ats_jax.config import Config
from ats_jax.config.schema.optimizer import AdamW
from ats_jax.model.layout import stacks
from ats_jax.model.param import trainable
from ats_jax.pytorch import weights
from ats_jax.pytorch.decoder import Decoder
from ats_jax.step.optimizers.base import decay_rates
from ats_jax.step.state import TrainState

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}  # in optax, and in torch.optim


def optimizer_of(cfg: Config, model: Decoder, abstract: TrainState) -> torch.optim.AdamW:
  """AdamW as `step.optimizers` has it: the same decay of the same parameters.

  Args:
    cfg: the run.
    model: whose parameters it moves.
    abstract: the state in JAX, which says what decays.
  """
  params = trainable(abstract.model)
  decays = jax.tree.leaves(decay_rates(cfg, params))
  parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
  groups: dict[float, list[Tensor]] = {}
  for ours, part in layout.named_arrays(params, stacks=stacks(cfg)).items():
    parameter = parameters.pop(weights.their_name(ours, parameters))
    groups.setdefault(decays[part.number], []).append(parameter)
  assert not parameters
  o = cfg.optimizer
  assert isinstance(o, AdamW)  # `check`
  return torch.optim.AdamW(
    [{"params": group, "weight_decay": decay} for decay, group in groups.items()],
    betas=(o.b1, o.b2),
    eps=o.eps,
    fused=next(model.parameters()).is_cuda,
  )


def to_torch(
  cfg: Config, state: TrainState, model: Decoder, optimizer: torch.optim.AdamW | None
) -> None:
  """Give a model, and its optimizer if there is one, what a state of JAX holds, copied."""
  arrays = _arrays(cfg, state)
  weights.put(model, {n: torch.tensor(a) for n, a in _under("model/", arrays).items()})
  if optimizer is None:
    return
  updates = torch.tensor(float(state.step))
  parameters = dict(model.named_parameters())
  for field, theirs in MOMENTS.items():
    for ours, array in _under(f"/{field}/", arrays).items():
      name = weights.their_name(ours, parameters)
      parameter = parameters[name]
      moment = weights.as_theirs(name, torch.tensor(array), parameter.dim())
      moments = optimizer.state[parameter]
      moments[theirs] = torch.empty_like(parameter, requires_grad=False).copy_(moment)
      moments["step"] = updates.to(parameter.device) if parameter.is_cuda else updates.clone()


def to_jax(
  cfg: Config, abstract: TrainState, model: Decoder, optimizer: torch.optim.AdamW, step: int
) -> TrainState:
  """A state of JAX, in memory of its own, of what PyTorch has after `step` updates."""
  tensors, parameters = model.state_dict(), dict(model.named_parameters())

  def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name == "step":
      return np.asarray(step, np.int32)
    if name.endswith("/steps"):
      made = next(iter(optimizer.state.values()))["step"]
      return np.asarray(int(made), np.int32)
    if name.startswith("model/"):
      their_name = weights.their_name(name.removeprefix("model/"), tensors)
      tensor = tensors[their_name]
    else:
      ((field, ours),) = [
        (theirs, name.split(f"/{field}/")[1])
        for field, theirs in MOMENTS.items()
        if f"/{field}/" in name
      ]
      their_name = weights.their_name(ours, parameters)
      tensor = optimizer.state[parameters[their_name]][field]
    return weights.as_ours(their_name, tensor.detach().cpu(), shape).numpy()

  leaves, structure = jax.tree.flatten(abstract)
  filled: list[Any] = [None] * len(leaves)
  for name, part in layout.named_arrays(abstract, stacks=stacks(cfg)).items():
    if name == "key":
      filled[part.number] = jax.random.key(cfg.seed)
    elif part.layer is None:
      filled[part.number] = value(name, part.shape).copy()
    else:
      if filled[part.number] is None:
        filled[part.number] = np.empty(part.leaf.shape, part.leaf.dtype)
      filled[part.number][part.layer] = value(name, part.shape)
  on_device = lambda x, like: jax.device_put(jnp.asarray(x), like.sharding)
  return structure.unflatten(list(map(on_device, filled, leaves)))


def shared_tensors(cfg: Config, tree: Any) -> dict[str, Tensor]:
  """The arrays of a model of JAX as tensors in the same memory, for `weights.put(..., share=True)`.

  Args:
    cfg: the resolved config.
    tree: a model whose arrays are each whole on one device; its layers are slices of stacks.

  Returns:
    Tensors by the names of a checkpoint. They are to be read only.
  """
  leaves = list(map(torch.from_dlpack, jax.tree.leaves(tree)))
  tensors = {}
  for name, part in layout.named_arrays(tree, stacks=stacks(cfg)).items():
    leaf = leaves[part.number]
    tensors[name] = leaf if part.layer is None else leaf[part.layer]
  return tensors


def _arrays(cfg: Config, state: TrainState) -> dict[str, np.ndarray]:
  """Every array of a state but its key, by the name that it has in a checkpoint."""
  leaves = jax.tree.leaves(state)
  arrays = {}
  for name, part in layout.named_arrays(state, stacks=stacks(cfg)).items():
    if name != "key":
      leaf = np.asarray(leaves[part.number])
      arrays[name] = leaf if part.layer is None else leaf[part.layer]
  return arrays


def _under(root: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  of_root: Callable[[str], bool] = lambda n: root in n and (root[0] == "/" or n.startswith(root))
  return {n.split(root, 1)[1]: a for n, a in arrays.items() if of_root(n)}
