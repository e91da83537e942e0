"""The configuration that carries the largest rate of a workload within service-level objectives: searched in the simulator, then measured."""
