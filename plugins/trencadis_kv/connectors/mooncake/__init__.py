"""Blocks in memory that engines share through Mooncake."""
