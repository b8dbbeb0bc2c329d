"""Runners of networks: PyTorch, recorded CUDA graphs, or the CPU kernel; and draft trees."""
