"""``POST /tokenize`` and ``POST /detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis_server.context import context_of
from trencadis_server.errors import ApiError
from trencadis_server.generation.chat_prompt import encode_messages
from trencadis_server.generation.logprobs import token_text
from trencadis_server.generation.prompts import check_size
from trencadis_server.protocol.json_body import JsonRoute, json_response
from trencadis_server.protocol.openapi import documented
from trencadis_server.protocol.tokenization import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from trencadis_server.routes.models import check_model

if TYPE_CHECKING:
    from trencadis.api import Tokenizer
    from trencadis_server.fair_threads import FairThreads

__all__ = ["make_router"]

_CHARACTERS_PER_TOKEN = 4


def make_router() -> APIRouter:
    """Return the routes. Pure."""
    router = APIRouter(tags=["tokens"], route_class=JsonRoute)
    router.add_api_route("/tokenize", tokenize, methods=["POST"], responses=documented(Tokenized))
    router.add_api_route("/detokenize", detokenize, methods=["POST"], responses=documented(Detokenized))
    return router


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Turn a text or a conversation into token ids."""
    context, caller = context_of(request), request.state.caller
    llm = context.llm
    check_model(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages.", param="prompt")
    token_ids = await _encode(body, llm.tokenizer, context.encoder, caller=caller, max_model_len=llm.max_model_len)
    texts = await context.encoder.run(
        lambda: (
            [token_text(llm.tokenizer.token_bytes(token)) for token in token_ids] if body.return_token_strs else None
        ),
        num_characters=len(token_ids),
        caller=caller,
    )
    return json_response(
        Tokenized(count=len(token_ids), max_model_len=llm.max_model_len, tokens=list(token_ids), token_strs=texts)
    )


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Turn token ids into text."""
    context = context_of(request)
    tokenizer = context.llm.tokenizer
    check_model(context, body.model)
    text = await context.encoder.run(
        lambda: tokenizer.decode(body.tokens),
        num_characters=_CHARACTERS_PER_TOKEN * len(body.tokens),
        caller=request.state.caller,
    )
    return json_response(Detokenized(prompt=text))


async def _encode(
    body: TokenizeRequest, tokenizer: Tokenizer, encoder: FairThreads, *, caller: str, max_model_len: int
) -> tuple[int, ...]:
    if body.messages is not None:
        if body.add_special_tokens:
            raise ApiError(
                400, "add_special_tokens: the chat template writes them. Leave it out.", param="add_special_tokens"
            )
        return await encode_messages(
            body.messages,
            tokenizer=tokenizer,
            encoder=encoder,
            caller=caller,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_arguments=body.chat_template_kwargs,
            max_model_len=max_model_len,
        )
    text = body.prompt or ""
    check_size(text, max_model_len, "prompt")
    adds_special = body.add_special_tokens is None or body.add_special_tokens
    # A text without tokens is no prompt for the engine, but has an answer here.
    return await encoder.run(
        lambda: tokenizer.encode(text, add_special_tokens=adds_special, may_be_empty=True),
        num_characters=len(text),
        caller=caller,
    )
