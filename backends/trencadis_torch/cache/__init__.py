"""The paged KV cache on the device, its storage formats, and copies of blocks in host memory."""
