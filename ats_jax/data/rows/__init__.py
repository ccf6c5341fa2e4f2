"""A corpus to packed rows in the order of training, and rows to batches."""
