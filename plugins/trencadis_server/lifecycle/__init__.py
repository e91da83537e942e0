"""A server from its start to its end: sockets, supervisor, application, shutdown."""
