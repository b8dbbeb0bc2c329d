"""Trainable draft nets, built of `model.layers`."""
