"""Ranks and how they share a model."""
