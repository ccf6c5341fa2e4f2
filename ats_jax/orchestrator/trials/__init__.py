"""What would have come of other actions? Comparisons from one state."""
