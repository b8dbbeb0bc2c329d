"""What people write and read: tokenizers, streamed text, prompts."""
