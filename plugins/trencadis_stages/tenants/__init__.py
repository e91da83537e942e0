"""Who asks: numbers, shares, and what of each tenant waits."""
