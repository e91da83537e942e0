"""From a plan to batches: passes, buckets and their warm-up."""
