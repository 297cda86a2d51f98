"""Heads: drafters that were trained for a target and read its hidden states. What they are, and their files."""
