"""Chats with tools: what a model is told of them, how it is made to call one, and how its calls are read back."""
