"""Pallas kernels. They import jax and numpy only; `ats_jax.ops` decides where each one is used."""
