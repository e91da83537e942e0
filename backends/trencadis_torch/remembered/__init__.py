"""Models that were loaded and proven once: a description and their packed weights in the user's cache."""
