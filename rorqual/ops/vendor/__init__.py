"""torch's own calls into CUDA's libraries (cuBLAS, cuBLASLt), for NVIDIA GPUs."""
