"""Metrics to decisions to a new state."""
