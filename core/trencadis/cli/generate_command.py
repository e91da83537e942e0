"""``trencadis generate``: prompts from the command line or standard input, texts on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from trencadis.cli.sampling_flags import add_sampling_flags, sampling_params_of
from trencadis.cli.structured_flags import cut_notice
from trencadis.client.client_request import ignored_output
from trencadis.client.llm import LLM
from trencadis.clock import Clock, SystemClock
from trencadis.config import Config
from trencadis.console import TextWriter, dimmed, stream_text, write_line
from trencadis.errors import InvalidRequestError, RequestError, StepFailedError
from trencadis.files import read_bytes
from trencadis.records import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from trencadis.registry import Registry

__all__ = [
    "DEFAULTS",
    "NEEDS_ALL_PLUGINS",
    "TERMINAL_LOG_LEVELS",
    "StreamFigures",
    "add_arguments",
    "prompts_of",
    "run",
    "speculation_summary",
    "write_stream",
]

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


def speculation_summary(name: str, totals: Mapping[str, Any]) -> str:
    """Return drafted and accepted tokens, their ratio, and the mean of tokens that a sequence got in a step. Pure.

    Args:
        name: Name of the speculator that the configuration names.
        totals: Totals of an engine that ``LLM.totals`` returns.
    """
    now = totals["drafter"]
    if now != name:
        name = f"{name}, after a failure {now or 'off'}"
    drafted, accepted = totals["num_draft_tokens"], totals["num_accepted_tokens"]
    rate = f" ({accepted / drafted:.1%})" if drafted else ""
    mean = totals["num_emitted_tokens"] / max(1, totals["num_sequence_steps"])
    return f"speculation {name}: {drafted} tokens drafted, {accepted} accepted{rate}; {mean:.2f} tokens per step"


@attrs.frozen(kw_only=True)
class StreamFigures:
    """How fast an answer came.

    Attributes:
        num_tokens: Tokens of the answer.
        first_s: Seconds until the first token; None if there was none.
        took_s: Seconds until the last one.
    """

    num_tokens: int
    first_s: float | None
    took_s: float

    @property
    def line(self) -> str:
        """In words: ``64 tokens · 87.4 tokens/s · first token after 0.21 s``. Tokens per second are those after the first."""
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.first_s is not None:
            if self.num_tokens > 1 and self.took_s > self.first_s:
                parts.append(f"{(self.num_tokens - 1) / (self.took_s - self.first_s):.1f} tokens/s")
            parts.append(f"first token after {self.first_s:.2f} s")
        return " · ".join(parts)


def write_stream(
    outputs: Iterable[RequestOutput], writer: TextWriter, *, clock: Clock | None = None
) -> tuple[RequestOutput, StreamFigures]:
    """Write the text of the first completion as it comes.

    Args:
        outputs: Outputs of one request, each with the whole text so far; at least one.
        writer: Writes.
        clock: Measures, from now on; the system's if none.

    Returns:
        The last output, and how fast it came.
    """
    clock = clock or SystemClock()
    start_s, first_s, num_written = clock.now_s(), None, 0
    last: RequestOutput | None = None
    for last in outputs:
        completion = last.outputs[0]
        if first_s is None and completion.token_ids:
            first_s = clock.now_s() - start_s
        writer.write(completion.text[num_written:])
        num_written = len(completion.text)
    if last is None:
        raise ValueError("a stream without an output.")
    took_s = clock.now_s() - start_s
    return last, StreamFigures(num_tokens=len(last.outputs[0].token_ids), first_s=first_s, took_s=took_s)


_LINES = "-"


def prompts_of(given: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts; with a file it is one: what was given, a line break, and the file's text as it is.

    Args:
        given: From the command line; ``-`` stands for the lines of standard input.
        file: A text file in UTF-8, or None.

    Raises:
        InvalidRequestError: No prompt, more than one beside a file, or a file that is no text.
    """
    prompts = list(_with_lines(given)) if file is None else [_with_file(given, file)]
    if not any(prompts):
        raise InvalidRequestError(
            "there is no prompt.",
            hint='Write trencadis generate "Once upon a time", or pipe lines into trencadis generate -.',
        )
    return prompts


def _with_lines(given: Sequence[str]) -> Iterator[str]:
    for prompt in given:
        if prompt == _LINES:
            yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        else:
            yield prompt


def _with_file(given: Sequence[str], file: str) -> str:
    if len(given) > 1 or _LINES in given:
        shown = " ".join(repr(prompt) for prompt in given)
        raise InvalidRequestError(
            f"--file {file!r} goes with one prompt or none, and there are: {shown}.",
            hint="Put the prompt into quotation marks, or run the command once for each.",
        )
    return "\n".join([*given, _read(file)])


def _read(file: str) -> str:
    try:
        # Bytes, so that line ends stay as they are.
        return read_bytes(file).decode("utf-8")
    except OSError as error:
        raise InvalidRequestError(
            f"--file {file!r} cannot be read: {error.strerror or error}.", hint="Correct the path."
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"--file {file!r} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}.",
            hint="Convert it first, for example with iconv.",
        ) from error
