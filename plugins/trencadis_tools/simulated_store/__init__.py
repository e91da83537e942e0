"""KV connector ``simulated_store``: a store of KV blocks beside simulated replicas, of which only sizes and times are there."""
