"""What a sampler prepares before a request can run, such as a grammar."""
