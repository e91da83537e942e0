"""Search, in the simulator, for the configuration that serves the largest rate of a workload within service-level objectives; then measurement."""
