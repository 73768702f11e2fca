"""Devices by name, and logical parameter axes on a mesh."""
