"""Drafts that are looked up in texts: what followed the same words there, with how often it did."""

__all__: list[str] = []
