"""Text in, text out: tokenizer, chat template, continuous batching and stop conditions."""
