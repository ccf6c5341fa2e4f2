"""Metal shaders for Apple GPUs, called from PyTorch: RMSNorm, RoPE, SwiGLU, the choice of experts.

Imports torch only. PyTorch compiles the sources in `csrc/` on the machine that runs them
(`torch.mps.compile_shader`), so there is nothing to build.
"""
