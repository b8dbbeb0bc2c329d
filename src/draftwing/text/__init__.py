"""Tokenizers, chat templates, prompts, text streams and grammars."""
