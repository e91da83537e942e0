"""Commands: bench, buckets, doctor, explain, new-plugin, warmup."""
