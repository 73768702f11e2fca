"""Text in, text out: tokenizers, chat templates, streaming and the engine that batches requests."""
