"""Measuring: prompts, interleaved runs, reports."""
