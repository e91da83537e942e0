"""Search in the simulator for the configuration with the largest rate within service-level objectives, then measurement."""
