"""The KV cache: blocks, their hashes, its size, compaction and swap to host memory."""
