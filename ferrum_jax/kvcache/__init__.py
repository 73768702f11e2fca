"""The KV: its preallocated arrays (`state`), who owns which block (`blocks`), and cache id to slot (`slots`)."""
