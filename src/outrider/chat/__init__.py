"""Chats with tools: how they are put to a model, and how its calls are read back."""
