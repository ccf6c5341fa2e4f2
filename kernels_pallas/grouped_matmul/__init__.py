"""Grouped matmul for dropless mixture-of-experts on Hopper, with both gradients."""
