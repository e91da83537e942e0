"""Why the last steps were planned as they were."""
