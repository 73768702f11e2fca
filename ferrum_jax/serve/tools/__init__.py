"""Calls of tools in what models write, one module for each way to write them."""
