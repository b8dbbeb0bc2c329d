"""Measuring: comparison, losslessness, the machine."""
