"""Heads and models on disk: GGUF, the layouts of other engines, cards, and checks of published heads."""
