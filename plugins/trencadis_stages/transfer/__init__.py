"""KV transfers with a KV connector."""
