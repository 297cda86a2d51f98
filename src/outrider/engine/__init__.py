"""The engine: requests, rounds, stop rules and statistics, and the `LLM` interface over it."""
