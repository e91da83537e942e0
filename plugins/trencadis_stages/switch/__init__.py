"""Another scheduling policy while the engine serves."""
