"""What runs a forward: PyTorch as it stands, recorded graphs, or the CPU kernel."""
