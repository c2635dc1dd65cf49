"""Kernels in Triton, for NVIDIA GPUs from SM80 on; Triton's interpreter runs them on the CPU for tests."""
