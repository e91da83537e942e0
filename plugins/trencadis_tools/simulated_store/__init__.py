"""KV connector ``simulated_store``: a store of KV blocks for simulated replicas that models sizes and times only."""
