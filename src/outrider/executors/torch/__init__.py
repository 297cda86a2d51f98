"""The torch executor: the readable reference, and the road to GPUs."""
