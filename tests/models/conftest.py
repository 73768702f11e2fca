"""Shapes and dtypes in the signatures of `ferrum_jax.models` are checked while these tests run."""
