"""Connector ``mooncake``: blocks in memory that engines share through Mooncake."""
