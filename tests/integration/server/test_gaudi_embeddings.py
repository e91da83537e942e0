"""``/v1/embeddings`` of a server on the emulated Gaudi."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from support.server.live_server import running
from trencadis import LLM, AsyncLLM

TABLES = {
    "backend": {"name": "gaudi", "gaudi": {"device": "emulated", "mode": "eager", "check_model": False}},
    "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 64},
    "cache": {"num_blocks": 8, "block_size": 16},
}
TEXTS = ["the sea", "The old man looked at the sea and said nothing for a long time.", "no"]


@pytest.mark.slow
def test_vectors_are_those_of_the_backend_torch():
    """In eager mode, which needs no warm-up; other modes: tests/backends/trencadis_gaudi/test_embedder.py."""
    with running(lambda: AsyncLLM({"path": "demo", "max_model_len": 64}, **TABLES)) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": "demo", "input": TEXTS}, timeout=60).json()
    llm = LLM("demo")
    expected = np.stack([one.vector for one in llm.embed(TEXTS)])
    llm.close()
    np.testing.assert_allclose([entry["embedding"] for entry in answer["data"]], expected, atol=1e-5)
