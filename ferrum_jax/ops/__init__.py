"""Arithmetic on arrays: attention, products, quantised weights, experts, rotary embeddings, norms, sampling."""
