"""Targets: the lean decoder and what it is built of, and the adapter over transformers."""
