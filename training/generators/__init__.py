"""Generators of user prompts, one module per way of making them."""
