"""The only door to kernels: one file an op, each with an XLA reference."""
