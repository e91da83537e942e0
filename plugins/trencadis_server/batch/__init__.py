"""Batches of requests from a file, answered by the same application as over HTTP; the files are those of OpenAI's batch API."""

from __future__ import annotations

from trencadis_server.batch.run import run_batch
from trencadis_server.batch.runner import Summary

__all__ = ["Summary", "run_batch"]
