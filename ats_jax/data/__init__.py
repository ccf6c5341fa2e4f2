"""Text to batches: files, tokens, packed rows, and a loader that loses and repeats nothing."""
