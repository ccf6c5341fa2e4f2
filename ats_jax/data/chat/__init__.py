"""Conversations: records -> turns -> the text of a template -> token ids, each with its weight."""
