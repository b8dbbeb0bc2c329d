"""GGUF files, llama.cpp's format: read as model folders, with their matrices as they lie in the file."""
