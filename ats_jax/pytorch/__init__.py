"""The decoder in PyTorch: the function of `ats_jax.model`, without jax.

These files import torch, and each other. So a Mac without jax runs them, and `bridge.remote_code`
joins them into the one file that stands in an export.
"""
