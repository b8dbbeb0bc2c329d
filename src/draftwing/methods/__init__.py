"""Drafters: one file per method, all behind ``base.Drafter``."""
