"""Request models (pydantic), answer models (msgspec), and a table of every documented field."""
