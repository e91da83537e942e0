"""A scheduling policy that is asked beside the one that decides."""
