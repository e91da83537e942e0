"""Messages between engines, and the sockets that carry them."""
