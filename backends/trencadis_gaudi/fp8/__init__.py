"""FP8: linear layers and the KV cache in ``float8_e4m3fn``, with static scales of the vendor's quantiser or dynamic ones."""
