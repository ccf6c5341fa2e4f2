"""Weights and settings of Hugging Face folders, both ways: a table a family, streamed."""
