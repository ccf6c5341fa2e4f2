"""Attention: the op, its kernels, and rows that are cut over devices."""
