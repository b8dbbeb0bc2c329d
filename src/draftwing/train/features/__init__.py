"""The target's hidden states, computed or read from disk."""
