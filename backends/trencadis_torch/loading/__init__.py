"""Model loading: files, inspection, the check of the paged forward, and the memory profile run."""
