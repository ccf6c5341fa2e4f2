"""Faults on purpose: what each way to guard a training run makes of them."""
