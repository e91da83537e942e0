"""An engine in a process of its own, connected by ZeroMQ and msgspec; it behaves as an engine in this process does.

    Frontend ─▶ RemoteEngineClient ══ ipc socket ══▶ EngineWorker ─▶ Engine        (``python -m trencadis.client.process``)
                     │    ▲                              │
                     │    └── StepOutputs, one per step ─┘
                     └── EngineProcess: starts the process, reports its end, kills it when it hangs

Imported only where ``[engine] placement`` is ``process``; this package imports nothing.
"""
