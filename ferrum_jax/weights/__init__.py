"""Reading of checkpoints into parameter trees: Hugging Face folders, GGUF files, Orbax checkpoints."""
