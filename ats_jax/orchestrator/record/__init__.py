"""What was seen, decided and changed, on disk and in words."""
