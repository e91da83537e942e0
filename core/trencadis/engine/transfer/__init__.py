"""KV transfers of a connector: loads, saves, remote prefills and first tokens."""
