"""Instruments that check the promise on a real model."""
