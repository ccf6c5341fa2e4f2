"""The training loop, and what it opens: data, program, checkpoints, logs, supervisor."""
