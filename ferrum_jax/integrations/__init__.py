"""Adapters to other projects; import each module directly."""
