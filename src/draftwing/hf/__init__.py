"""Draftwing inside transformers' own ``generate``: as a callable that it takes for its decoding loop."""
