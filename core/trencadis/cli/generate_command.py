"""``trencadis generate``: prompts from the command line or standard input, texts on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

import msgspec

from trencadis.cli.prompts import prompts_of
from trencadis.cli.sampling_flags import add_sampling_flags, sampling_params_of
from trencadis.cli.speculation_summary import speculation_summary
from trencadis.cli.streaming import write_stream
from trencadis.cli.structured_flags import cut_notice
from trencadis.client.client_request import ignored_output
from trencadis.client.llm import LLM
from trencadis.clock import SystemClock
from trencadis.config import Config
from trencadis.console import dimmed, stream_text, write_line
from trencadis.errors import RequestError, StepFailedError
from trencadis.records import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from trencadis.registry import Registry

__all__ = ["DEFAULTS", "NEEDS_ALL_PLUGINS", "TERMINAL_LOG_LEVELS", "add_arguments", "run"]

DEFAULTS = {"max_tokens": 64, "temperature": 0.7, "min_p": 0.1, "seed": 0}
"""Where the command differs from ``SamplingParams``; with a fixed seed the same command prints the same text."""

NEEDS_ALL_PLUGINS = False
TERMINAL_LOG_LEVELS = "warning", "warning"

_NO_SPECULATION = "none"
_MAX_SHOWN_CHARS = 1000
_BREAK = "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "The same command prints the same text: the seed is 0 unless --seed says otherwise (none: not seeded). "
        "With speculation, standard error gets a line that says how many tokens were drafted and accepted."
    )
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help='text to continue; "-": one from each line of stdin'
    )
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="a text file in UTF-8: the prompt is PROMPT, a line break and the text of the file, or that text alone",
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, written by the chat template"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each completion")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print text as it comes (default: on a terminal, with one completion for each prompt)",
    )
    add_sampling_flags(parser, defaults=DEFAULTS)


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Generate and print; returns 0.

    Raises:
        InvalidRequestError: No prompt, a file that cannot be read, or impossible sampling parameters.
        StepFailedError: One of several prompts was refused or failed while it ran; the others are printed first.
        TrencadisError: The model cannot be loaded, or the only prompt cannot be served.
    """
    params = sampling_params_of(args, defaults=DEFAULTS)
    prompts = prompts_of(args.prompts, args.file)
    streams = sys.stdout.isatty() if args.stream is None else args.stream
    with LLM.from_config(config, registry) as llm:
        if streams and params.n == 1 and not args.json:
            outputs = _print_streams(llm, prompts, params, chat=args.chat)
        else:
            outputs = _generate(llm, prompts, params, chat=args.chat)
            _print_outputs(outputs, prompts, as_json=args.json, several=params.n > 1)
        if config.speculation.name != _NO_SPECULATION:
            print(speculation_summary(config.speculation.name, llm.totals()), file=sys.stderr)
    if params.structured is not None:
        print(cut_notice(outputs, max_tokens=params.max_tokens), file=sys.stderr, end="")
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise StepFailedError(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")
    return 0


def _generate(llm: LLM, prompts: list[str], params: SamplingParams, *, chat: bool) -> list[RequestOutput]:
    if chat:
        chats = [[_user_message(prompt)] for prompt in prompts]
        return llm.chat(chats if len(chats) > 1 else chats[0], params)
    return llm.generate(prompts if len(prompts) > 1 else prompts[0], params)


def _print_streams(llm: LLM, prompts: list[str], params: SamplingParams, *, chat: bool) -> list[RequestOutput]:
    """Print texts as they come: all run together, and are printed one after the other.

    On a terminal each follows its prompt, and a line of figures comes last.
    """
    clock, on_terminal = SystemClock(), sys.stdout.isatty()
    start_s = clock.now_s()
    streams = [_stream(llm, index, prompts, params, chat=chat) for index in range(len(prompts))]
    outputs = []
    for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        with stream_text() as writer:
            if on_terminal:
                number = f"[{index}] " if len(prompts) > 1 else ""
                writer.write(f"{number}{_end_of(prompt)}{_BREAK if chat else ''}", dim=True)
            elif len(prompts) > 1:
                writer.write(f"{_heading(index, prompt)}\n")
            output, figures = write_stream(stream, writer, clock=clock)
            outputs.append(output)
            if not on_terminal:
                writer.write("\n")
    if on_terminal:
        took_s, num_tokens = clock.now_s() - start_s, sum(len(output.outputs[0].token_ids) for output in outputs)
        of_all = f"{len(prompts)} prompts · {num_tokens} tokens · {num_tokens / took_s:.1f} tokens/s"
        write_line(dimmed(figures.line if len(prompts) == 1 else of_all))
    return outputs


def _end_of(prompt: str) -> str:
    """Return a prompt as it is shown before its text: the end of a long one. Pure."""
    return prompt if len(prompt) <= _MAX_SHOWN_CHARS else f"… {prompt[-_MAX_SHOWN_CHARS:]}"


def _stream(llm: LLM, index: int, prompts: list[str], params: SamplingParams, *, chat: bool) -> Iterable[RequestOutput]:
    """Queue one prompt; one of several that is refused does not keep the others from running."""
    prompt = prompts[index]
    try:
        return llm.stream_chat([_user_message(prompt)], params) if chat else llm.stream(prompt, params)
    except RequestError as error:
        if len(prompts) == 1:
            raise
        return (ignored_output(str(index), prompt, error),)


def _print_outputs(outputs: list[RequestOutput], prompts: list[str], *, as_json: bool, several: bool) -> None:
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if len(prompts) > 1 and not as_json:
            print(_heading(index, prompt))
        for completion in output.outputs:
            if as_json:
                print(json.dumps(_as_json(output, completion.index, several=several), ensure_ascii=False))
            else:
                print(f"({completion.index}) {completion.text}" if several else completion.text)


def _as_json(output: RequestOutput, index: int, *, several: bool) -> dict[str, object]:
    completion = output.outputs[index]
    reason = completion.finish_reason
    record: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(output.prompt_token_ids),
        "finish_reason": None if reason is None else reason.value,
    }
    if several:
        record["index"] = index
    if completion.score is not None:
        record["score"] = completion.score
    for name, entries in (("logprobs", completion.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if entries is not None:
            record[name] = [_entry(entry) for entry in entries]
    if reason in (FinishReason.ERROR, FinishReason.INVALID, FinishReason.IGNORED):
        record["error"] = output.error
    return record


def _entry(entry: TokenLogprobs) -> dict[str, object]:
    """Return log-probabilities as a table; whose they are is known from where they stand. Pure."""
    return {name: value for name, value in msgspec.structs.asdict(entry).items() if name != "index"}


def _heading(index: int, prompt: str) -> str:
    return f"[{index}] {prompt}"


def _user_message(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}
