"""Linear layers and whole decoders in native code: packed float32 weights, int8 weights, fused modules."""
