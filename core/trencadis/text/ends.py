"""Tokens that end a turn, from all who name some: generation config, config, tokenizer and chat template.

They often disagree: fine-tuned models come with a tokenizer that ends turns with ``<|im_end|>`` and a config that says ``<|endoftext|>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trencadis.text.chat_template import chat_template_of
from trencadis.text.tokenizer import Tokenizer

__all__ = ["ends_of_turn"]


def ends_of_turn(
    tokenizer: Tokenizer, named: Mapping[str, Iterable[int]], *, always_tries: bool = False
) -> dict[int, tuple[str, ...]]:
    """Return the tokens that end a turn, each with those who name it.

    The template's own end counts where the template writes none of the others: what a template writes after an assistant's text need
    not end an answer. That of gpt-oss ends a channel, after which the answer goes on with the next one; it writes ``<|return|>`` as well.

    Args:
        tokenizer: The model's.
        named: Ends by where they stand, such as ``generation_config.json``.
        always_tries: Render the template, in a worker process, also where it could add none, to name it beside the others.
    """
    found: dict[int, list[str]] = {}
    for source, token_ids in named.items():
        for token_id in token_ids:
            found.setdefault(token_id, []).append(source)
    if tokenizer.eos_token_id is not None:
        found.setdefault(tokenizer.eos_token_id, []).append("tokenizer")
    source = tokenizer.find_template()
    writes_known = _writes(source, tokenizer, found)
    if source and (always_tries or not writes_known):
        token = chat_template_of(source, tokenizer.special_tokens).end_of_turn(tokenizer.control_tokens)
        end = None if token is None else tokenizer.control_tokens[token]
        if end is not None and (end in found or not writes_known):
            found.setdefault(end, []).append("chat template")
    return {token_id: tuple(sources) for token_id, sources in found.items()}


def _writes(source: str, tokenizer: Tokenizer, ends: Iterable[int]) -> bool:
    """Return whether a template's source has one of some tokens, or the name of the tokenizer's end. Pure."""
    ids = set(ends)
    texts = [text for text, token_id in tokenizer.control_tokens.items() if token_id in ids]
    return any(text in source for text in texts) or (tokenizer.eos_token_id is not None and "eos_token" in source)
