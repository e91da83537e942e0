"""An engine in a process of its own, connected by a pair of sockets and msgspec; it behaves as an engine in this process does.

    Frontend ─▶ RemoteEngineClient ══ sockets ══════▶ EngineWorker ─▶ Engine        (``python -m trencadis_remote.process``)
                     │    ▲                              │
                     │    └── StepOutputs, one per step ─┘
                     └── EngineProcess: starts the process, reports its end, kills it when it hangs

This package imports nothing.
"""
