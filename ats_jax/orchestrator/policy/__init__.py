"""What is wrong and what would help: pure functions of replicated numbers."""
