"""Checkpoints to parameter trees: Hugging Face folders, GGUF files, Orbax checkpoints."""
