"""An adaptive training system in JAX/Flax for dense and sparse decoder-only transformers."""

__version__ = "0.2.0"
