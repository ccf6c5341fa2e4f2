"""CUDA C++ kernels behind `jax.ffi`; `ats_jax.ops` decides where each one is used.

They import jax and numpy only and work on the arrays of one device: call them in a `jax.shard_map`.
`library.load()` builds them and says in one line why it cannot.
"""
