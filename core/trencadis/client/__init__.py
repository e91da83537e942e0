"""The user's side of the engine: prompts in, text out. What ``LLM`` and ``AsyncLLM`` share."""

from __future__ import annotations

from trencadis.client.beam_request import BeamRequest
from trencadis.client.beam_rounds import BeamRounds
from trencadis.client.client_request import ClientRequest, ignored_output
from trencadis.client.client_stream import ClientStream
from trencadis.client.expand import expand
from trencadis.client.frontend import Frontend
from trencadis.client.opening import configure, load_frontend_tokenizer, open_frontend
from trencadis.client.output_processor import OutputProcessor
from trencadis.client.prompts import (
    OnRefusal,
    Prompt,
    as_list,
    as_token_ids,
    at_prompt,
    check_on_refusal,
    is_single,
    per_prompt,
)

__all__ = [
    "BeamRequest",
    "BeamRounds",
    "ClientRequest",
    "ClientStream",
    "Frontend",
    "OnRefusal",
    "OutputProcessor",
    "Prompt",
    "as_list",
    "as_token_ids",
    "at_prompt",
    "check_on_refusal",
    "configure",
    "expand",
    "ignored_output",
    "is_single",
    "load_frontend_tokenizer",
    "open_frontend",
    "per_prompt",
]
