"""Speculative decoding that can be seen in the clock and nowhere else."""
