"""torch's own calls into CUDA's libraries (cuBLAS, cuBLASLt), and its flash attention, for NVIDIA GPUs."""
