"""What is wrong with a head, before it is blamed on speculative decoding."""
