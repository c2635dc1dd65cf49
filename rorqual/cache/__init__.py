"""Paged KV cache: blocks, their names, cache groups, and the tensors behind them."""
