"""KV blending: KV of independently computed chunks is combined into the KV of one prompt."""
