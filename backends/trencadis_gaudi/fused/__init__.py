"""Modules of a model that run in fused kernels of the vendor."""
