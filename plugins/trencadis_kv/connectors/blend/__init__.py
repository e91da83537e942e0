"""Connector ``blend``: approximate KV of chunks of prompts, in any order."""
