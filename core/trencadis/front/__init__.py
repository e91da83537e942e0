"""The user's side of the engine: prompts in, text out. What ``LLM`` and ``AsyncLLM`` share."""

from __future__ import annotations

from trencadis.front.client_request import ClientRequest
from trencadis.front.expand import expand
from trencadis.front.frontend import Frontend
from trencadis.front.opening import configure, load_frontend_tokenizer, open_frontend
from trencadis.front.output_processor import OutputProcessor
from trencadis.front.prompts import Prompt, as_list, as_token_ids, is_single, per_prompt

__all__ = [
    "ClientRequest",
    "Frontend",
    "OutputProcessor",
    "Prompt",
    "as_list",
    "as_token_ids",
    "configure",
    "expand",
    "is_single",
    "load_frontend_tokenizer",
    "open_frontend",
    "per_prompt",
]
