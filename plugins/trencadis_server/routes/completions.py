"""``POST /v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis_server.errors import ApiError
from trencadis_server.generation.completion_writer import CompletionWriter
from trencadis_server.generation.generation_call import GenerationCall, open_call
from trencadis_server.generation.prompts import TokenIds, check_room, echoes, encode_inputs, truncated
from trencadis_server.generation.sampling import beam_params, sampling_params
from trencadis_server.protocol.completions import CompletionRequest, TextCompletion
from trencadis_server.protocol.json_body import JsonRoute
from trencadis_server.protocol.openapi import documented

if TYPE_CHECKING:
    from trencadis import AsyncLLM
    from trencadis.records import SamplingParams

__all__ = ["make_router"]

_PARAM = "prompt"
_DEFAULT_MAX_TOKENS = 16
"""Source: OpenAI's API reference."""


def make_router() -> APIRouter:
    """Return the route. Pure."""
    router = APIRouter(tags=["generation"], route_class=JsonRoute)
    router.add_api_route(
        "/v1/completions",
        create_completion,
        methods=["POST"],
        responses=documented(TextCompletion, stream=TextCompletion),
    )
    return router


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue texts."""
    call = open_call(request, body, param=_PARAM)
    params = await call.params(lambda: _params(body, call.llm))
    beams = beam_params(body, max_tokens=params.max_tokens, logprobs=body.logprobs)
    prompts = await _prompts(body, call)
    generation = call.generation("cmpl", prompts=prompts, params=params, beams=beams)
    texts = await call.context.encoder.run(
        lambda: echoes(body, prompts, call.llm.tokenizer),
        num_characters=generation.num_prompt_tokens if body.echo else 0,
        caller=generation.caller,
    )
    writer = CompletionWriter(
        answer_id=generation.answer_id,
        created=call.created,
        model=call.model,
        fingerprint=call.context.fingerprint,
        tokenizer=call.llm.tokenizer,
        body=body,
        echoes=texts,
    )
    return await call.answer(generation, writer, writer.whole)


def _params(body: CompletionRequest, llm: AsyncLLM) -> SamplingParams:
    _check_best_of(body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens = 0 asks for nothing. Set echo, or at least 1.", param="max_tokens")
    scored = body.logprobs if body.echo else None
    return sampling_params(
        body,
        tokenizer=llm.tokenizer,
        max_tokens=max(1, _max_tokens(body)),
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs if scored is None else max(scored, body.prompt_logprobs or 0),
    )


def _check_best_of(body: CompletionRequest) -> None:
    best_of, n = body.best_of or body.num_choices, body.num_choices
    if best_of < n:
        raise ApiError(
            400, f"best_of = {best_of} is below n = {n}: it is how many texts n are chosen from.", param="best_of"
        )
    if best_of > n and body.stream:
        raise ApiError(
            400,
            f"best_of = {best_of} above n = {n} cannot stream: which texts are best is known at the end only. Leave out stream.",
            param="best_of",
        )


async def _prompts(body: CompletionRequest, call: GenerationCall) -> list[TokenIds]:
    llm, num_output = call.llm, max(1, body.max_tokens or 1)
    encoded = await encode_inputs(
        body.prompt,
        llm=llm,
        context=call.context,
        caller=call.caller,
        add_special_tokens=body.add_special_tokens is None or body.add_special_tokens,
        is_cut=body.truncate_prompt_tokens is not None,
        num_output=num_output,
        param=_PARAM,
    )
    prompts = [
        truncated(
            one,
            body.truncate_prompt_tokens,
            tokenizer=llm.tokenizer,
            max_model_len=llm.max_model_len,
            max_tokens=_max_tokens(body),
        )
        for one in encoded
    ]
    check_room(prompts, max_model_len=llm.max_model_len, num_output=num_output, param=_PARAM)
    return prompts


def _max_tokens(body: CompletionRequest) -> int:
    return _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
