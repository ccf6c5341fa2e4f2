"""Optimizers and transformations that come from optax, or from a module of the user's."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import optax

from ats_jax.config.schema import Config
from ats_jax.config.schema.optimizer import FromOptax
from ats_jax.ops.registry import XLA, Kernels
from ats_jax.step.optimizers.base import Optimizer, clipping, decoupled_decay


def from_optax(cfg: Config, platform: str, kernels: Kernels = XLA) -> Optimizer:
  """Clip, what `optimizer.factory` makes, decoupled weight decay.

  What takes a `learning_rate` is made with 1, and its updates are those of descent: directions are
  minus them. Anything else makes directions. The schedule and the decay are this program's: a
  `weight_decay` that the factory takes is 0 unless `optimizer.arguments` has it.

  Raises:
    ValueError: if there is no such factory, or it makes no transformation of these arguments.
  """
  del kernels
  o = cfg.optimizer
  assert isinstance(o, FromOptax)
  factory = _find(o.factory)
  takes = inspect.signature(factory).parameters
  arguments: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in takes else {}
  arguments |= {name: _number(value) for name, value in o.arguments.items()}
  is_optimizer = "learning_rate" in takes
  if is_optimizer:
    arguments |= {"learning_rate": 1.0}
  try:
    tx = factory(**arguments)
  except (TypeError, ValueError) as e:
    raise ValueError(
      f"optimizer.factory={o.factory} with optimizer.arguments={dict(o.arguments)}: {e}. It takes "
      f"{', '.join(takes)}."
    ) from e
  if not isinstance(tx, optax.GradientTransformation):
    raise ValueError(
      f"optimizer.factory={o.factory} made {tx!r:.80}: expected an optax.GradientTransformation."
    )
  descent = (optax.scale(-1.0),) if is_optimizer else ()
  return Optimizer(
    optax.chain(*clipping(cfg, platform), tx, *descent, *decoupled_decay(cfg)), platform
  )


def _find(path: str) -> Callable[..., Any]:
  module, _, name = path.rpartition(".")
  try:
    found = getattr(importlib.import_module(module), name) if module else None
  except ImportError as e:
    raise ValueError(f"optimizer.factory={path}: {module} cannot be imported ({e}).") from e
  except AttributeError as e:
    raise ValueError(f"optimizer.factory={path}: {module} has no {name}.") from e
  if not callable(found):
    raise ValueError(
      f"optimizer.factory={path} is no function of a module. Example: optax.contrib.ademamix"
    )
  return found


def _number(value: float) -> float | int:
  """A whole number as an int, which many arguments must be."""
  return int(value) if float(value).is_integer() else value
