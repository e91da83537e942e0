"""Commands: bench, buckets, doctor, explain, layout, new-plugin, warmup."""
