"""Readers of files by suffix. `source` finds the files; `records` is where a new format goes in."""
