"""Heads on disk: our own folders, the layouts of other engines, and what goes wrong between them."""
