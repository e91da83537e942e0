"""From a request's fields to engine requests, and from their outputs to answers."""
