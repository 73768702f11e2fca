"""Adapters to other projects, each imported only by those who use it."""
