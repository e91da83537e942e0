"""The engine in a process of its own, behind ZeroMQ and msgspec; the user's side cannot tell the difference.

    Frontend ─▶ RemoteEngineClient ══ ipc socket ══▶ EngineHost ─▶ Engine        (``python -m trencadis.client.process``)
                     │    ▲                              │
                     │    └── StepMessage, one per step ─┘
                     └── EngineProcess: starts it, hears its death, kills it when it hangs

What only one placement needs, ZeroMQ above all, is imported when it is chosen.
"""

from __future__ import annotations

from trencadis.client.process.opening import open_placed_frontend, open_runner

__all__ = ["open_placed_frontend", "open_runner"]
