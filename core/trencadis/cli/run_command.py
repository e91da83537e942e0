"""``trencadis run``: the answer to one prompt, or a conversation if there is none."""

from __future__ import annotations

import argparse
import sys

from trencadis.cli.chat_command import converse
from trencadis.cli.conversation import CHAT_DEFAULTS, Conversation, check_one_answer, has_template, pieces_of
from trencadis.cli.sampling_flags import add_sampling_flags, sampling_params_of
from trencadis.client.llm import LLM
from trencadis.config import Config
from trencadis.console import stream_text
from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams
from trencadis.registry import Registry

__all__ = ["TAKES_MODEL", "NEEDS_ALL_PLUGINS", "TERMINAL_LOG_LEVELS", "add_arguments", "run"]

TAKES_MODEL = True
NEEDS_ALL_PLUGINS = False
TERMINAL_LOG_LEVELS = "warning", "warning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "A model with a chat template answers the prompt as a message, one without continues it. Without a prompt it is a "
        "conversation, as of trencadis chat; from a pipe all of standard input is the prompt."
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="one prompt; several words are joined by spaces")
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told first")
    add_sampling_flags(parser, defaults=CHAT_DEFAULTS)


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Answer and print; returns 0.

    Raises:
        RequestError: No prompt from a pipe, impossible sampling parameters, or a prompt that cannot be served.
        TrencadisError: The model cannot be loaded.
    """
    params = sampling_params_of(args, defaults=CHAT_DEFAULTS)
    check_one_answer(params)
    prompt = " ".join(args.prompt)
    if not prompt and not sys.stdin.isatty():
        prompt = sys.stdin.read().rstrip("\r\n")
        if not prompt.strip():
            raise InvalidRequestError(
                "there is no prompt.", hint='Write trencadis run MODEL "Who is there?", or pipe a text into it.'
            )
    with LLM.from_config(config, registry) as llm:
        if prompt:
            _print(llm, prompt, params, args.system)
        else:
            converse(Conversation(llm, params, system=args.system), model=config.model.path)
    return 0


def _print(llm: LLM, prompt: str, params: SamplingParams, system: str) -> None:
    if not has_template(llm) and system:
        raise InvalidRequestError(f"--system {system!r}: this model has no chat template, so it is told nothing first.")
    if has_template(llm):
        texts = Conversation(llm, params, system=system).answer(prompt)
    else:
        texts = (piece.text for piece in pieces_of(llm.stream(prompt, params)))
    with stream_text() as writer:
        for text in texts:
            writer.write(text)
