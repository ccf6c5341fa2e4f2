"""Where arrays live: mesh, logical axes, global batches."""
