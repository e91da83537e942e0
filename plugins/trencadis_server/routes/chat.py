"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis_server.errors import ApiError
from trencadis_server.generation.chat_prompt import encode_messages
from trencadis_server.generation.chat_writer import ChatWriter
from trencadis_server.generation.generation_call import GenerationCall, open_call
from trencadis_server.generation.prompts import check_room, truncated
from trencadis_server.generation.sampling import beam_params, sampling_params
from trencadis_server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from trencadis_server.protocol.json_body import JsonRoute
from trencadis_server.protocol.openapi import documented

if TYPE_CHECKING:
    from trencadis import AsyncLLM
    from trencadis.records import SamplingParams

__all__ = ["make_router"]

_PARAM = "messages"


def make_router() -> APIRouter:
    """Return the route. Pure."""
    router = APIRouter(tags=["generation"], route_class=JsonRoute)
    router.add_api_route(
        "/v1/chat/completions",
        create_chat_completion,
        methods=["POST"],
        responses=documented(ChatCompletion, stream=ChatChunk),
    )
    return router


async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    call = open_call(request, body, param=_PARAM)
    params = await call.params(lambda: _params(body, call.llm))
    beams = beam_params(body, max_tokens=params.max_tokens, logprobs=params.logprobs)
    prompt = await _prompt(body, call)
    generation = call.generation("chatcmpl", prompts=[prompt], params=params, beams=beams)
    writer = ChatWriter(
        answer_id=generation.answer_id,
        created=call.created,
        model=call.model,
        fingerprint=call.context.fingerprint,
        tokenizer=call.llm.tokenizer,
        body=body,
    )
    return await call.answer(generation, writer, lambda outputs: writer.whole(outputs[0]))


def _params(body: ChatRequest, llm: AsyncLLM) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    return sampling_params(
        body,
        tokenizer=llm.tokenizer,
        max_tokens=body.most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


async def _prompt(body: ChatRequest, call: GenerationCall) -> tuple[int, ...]:
    llm, limit = call.llm, body.truncate_prompt_tokens

    def finish(encoded: tuple[int, ...]) -> tuple[int, ...]:
        prompt = truncated(
            encoded,
            limit,
            tokenizer=llm.tokenizer,
            max_model_len=llm.max_model_len,
            max_tokens=body.most_tokens,
        )
        check_room(
            [prompt],
            max_model_len=llm.max_model_len,
            num_output=max(1, body.most_tokens or 1),
            param=_PARAM,
            output_param=body.most_tokens_field,
        )
        return prompt

    return await encode_messages(
        body.messages,
        tokenizer=llm.tokenizer,
        encoder=call.context.encoder,
        caller=call.caller,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_arguments=body.chat_template_kwargs,
        max_model_len=llm.max_model_len if limit is None else None,
        finish=finish,
    )
