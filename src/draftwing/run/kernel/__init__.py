"""The CPU kernel: compiled code and the programs it walks."""
