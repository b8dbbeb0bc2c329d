"""Chooses the layers with which a target drafts for itself, on this machine (Draft & Verify, 2309.08168)."""
