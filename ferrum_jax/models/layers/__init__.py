"""Arithmetic that families share: arrays and numbers in, arrays out."""
