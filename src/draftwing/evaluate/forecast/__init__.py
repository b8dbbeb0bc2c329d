"""What a head will bring, from what it would have proposed on held-out prompts."""
