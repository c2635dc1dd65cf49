"""Kernels in C for the CPU, built when the package is installed; what they cannot take falls to ops/cpu."""
