"""A batch in flight for each stage of a pipeline."""
