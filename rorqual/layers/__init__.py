"""Modules that own weights."""
