"""Computations: one file per op, a contract and its plain reference."""
