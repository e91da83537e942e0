"""The user's side of the engine: prompts in, text out. What ``LLM`` and ``AsyncLLM`` share."""

from __future__ import annotations

from trencadis.front.beam_request import BeamRequest
from trencadis.front.beam_rounds import BeamRounds
from trencadis.front.client_request import ClientRequest, ignored_output
from trencadis.front.client_stream import ClientStream
from trencadis.front.expand import expand
from trencadis.front.frontend import Frontend
from trencadis.front.opening import configure, load_frontend_tokenizer, open_frontend
from trencadis.front.output_processor import OutputProcessor
from trencadis.front.prompts import (
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
