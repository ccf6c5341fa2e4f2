"""Speed: of a training step, of settings in turn, of the tiles of kernels."""
