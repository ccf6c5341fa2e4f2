"""The laboratory: what measures this package against others and against faults. Not installed."""
