"""Dialects: what clients speak. Each parses a request into a `Conversation` and writes a turn back in its own grammar."""
