"""What goes over the wire: requests (pydantic), answers (msgspec), and one table of every documented field."""
