"""Parsers of tool calls in models' answers, one module for each format."""
