"""What a look sees: an interval of steps, experts, health."""
