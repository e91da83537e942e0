"""``/metrics``: metrics of the engine's observers and of the HTTP side, in Prometheus' text format, with or without an engine."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response

from trencadis.api import LEDGER
from trencadis.errors import EngineEndedError, TrencadisError
from trencadis_server.context import ServerContext, context_of
from trencadis_server.http_metrics import HttpMetrics

__all__ = ["CONTENT_TYPE", "make_router"]

logger = logging.getLogger("trencadis.server")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Source: Prometheus, exposition formats, text format 0.0.4."""

_ENGINE_TIMEOUT_S = 2.0
"""Longest wait of a scrape for an engine in a long step, seconds; below the usual scrape time-out of 10 s."""


def make_router(metrics: HttpMetrics) -> APIRouter:
    """Return the route.

    Args:
        metrics: Metrics of the HTTP side.
    """
    router = APIRouter()

    @router.get("/metrics", summary="Metrics", tags=["operate"], response_class=Response)
    async def show(request: Request) -> Response:
        """Counters, gauges and histograms of the engine and of the HTTP side, for Prometheus."""
        context = context_of(request)
        engine_text = await _engine_text(context)
        own_text = metrics.text(
            engine_up=engine_text is not None,
            num_requests=getattr(context.admission, "num_requests", 0),
            num_waiting_tokens=getattr(context.admission, "num_waiting_tokens", 0),
        )
        return Response((engine_text or "") + own_text + LEDGER.metrics(), media_type=CONTENT_TYPE)

    return router


async def _engine_text(context: ServerContext) -> str | None:
    """Return the observers' metrics; empty on timeout, None if no engine makes progress."""
    try:
        if context.llm.stalled:
            return None
        text = await context.llm.metrics(timeout_s=_ENGINE_TIMEOUT_S)
    except EngineEndedError:
        return None
    except TrencadisError as error:
        logger.warning("The engine's metrics are left out: %s", error)
        return ""
    return text if not text or text.endswith("\n") else f"{text}\n"
