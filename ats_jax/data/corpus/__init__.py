"""Documents to a tokenised corpus on disk, made by several processes and cached."""
