"""A server's life cycle: sockets, supervisor, application, shutdown."""
