"""Metrics of a run: writing, showing and reading them; speed, memory and where the time goes."""
