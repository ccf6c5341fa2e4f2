"""`bridge train`: a run of this program whose steps PyTorch makes, e.g. on a Mac.

The workdir is that of any run: its settings, its metrics, and checkpoints that JAX restores. Data,
schedule and the first weights come from the same code, with jax on the CPU. Needs the extra torch.
"""
