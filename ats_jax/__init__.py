"""An adaptive training system in JAX/Flax for dense and sparse decoder-only transformers.

`ats_jax.api` has its functions for scripts and notebooks; it is imported when it is first used.
"""

import importlib
from typing import Any

__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
  if name == "api":
    return importlib.import_module("ats_jax.api")
  raise AttributeError(f"module 'ats_jax' has no attribute {name!r}")
