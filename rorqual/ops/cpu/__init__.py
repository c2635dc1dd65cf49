"""Faster answers on CPU, one file per op."""
