"""Batch -> logits. Knows no mesh axis, no optimizer and no file."""

from flax import nnx

# Modules are plain pytrees under plain jax transforms (docs/internals/adr/0001). Set before any is
# built.
nnx.set_graph_mode(False)
nnx.set_graph_updates(False)
