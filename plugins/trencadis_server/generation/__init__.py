"""From a request's fields to outputs of the engine, and from these to answers."""
