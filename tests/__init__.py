"""Tests, and what they share; `tests` mirrors the package."""
