"""The KV cache: blocks, their hashes, and its size."""
