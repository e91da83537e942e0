"""Steps around every route: keys, limits, bodies, errors."""
