"""Directories of KV objects as one safetensors file, and back."""
