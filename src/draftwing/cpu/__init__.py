"""The CPU kernel: compiled code and the programs that it runs."""
