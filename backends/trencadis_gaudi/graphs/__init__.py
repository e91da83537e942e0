"""Graph capture and warm-up of buckets."""
