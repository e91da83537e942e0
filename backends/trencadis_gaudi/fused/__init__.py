"""Model parts that run in the vendor's fused kernels."""
