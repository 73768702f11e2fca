"""The KV: its arrays (`state`), who holds which block (`blocks`), known prefixes, sequences, and `KvTransaction`."""
