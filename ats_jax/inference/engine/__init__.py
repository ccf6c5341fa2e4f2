"""Many requests at once: the host's side of generation, which knows no jax."""
