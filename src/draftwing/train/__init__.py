"""Training of draft models: data, objectives and the loop."""
