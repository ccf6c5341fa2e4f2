"""Kernels in Triton, for NVIDIA GPUs from sm_80 on; one source for JAX and PyTorch."""
