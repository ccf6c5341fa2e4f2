"""What a machine is, and whether a run would do well on it."""
