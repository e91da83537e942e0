"""A share of a model for one of several ranks (tensor parallelism): plans, local modules, slices of weights, tokens from one rank."""
