from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trencadis.clock import SystemClock
from trencadis.errors import InvalidRequestError
from trencadis.text import Tokenizer
from trencadis_server.errors import ApiError
from trencadis_server.fair_threads import FairThreads
from trencadis_server.generation.prompts import check_room, echoes, encode_inputs, truncated
from trencadis_server.middleware.limits import AdmissionControl
from trencadis_server.protocol.completions import CompletionRequest


def encode(tokenizer: Tokenizer, inputs: Any, **options: Any) -> list[tuple[int, ...]]:
    threads = options.pop("threads", None) or FairThreads()
    limits = {"max_requests": 1024, "max_waiting_tokens": 10**6, **options.pop("limits", {})}

    async def main() -> list[tuple[int, ...]]:
        llm: Any = SimpleNamespace(tokenizer=tokenizer, max_model_len=16, model=SimpleNamespace(vocab_size=97))
        context: Any = SimpleNamespace(encoder=threads, admission=AdmissionControl(**limits, clock=SystemClock()))
        wanted = {
            "caller": "",
            "add_special_tokens": True,
            "is_cut": False,
            "num_output": 1,
            "param": "prompt",
            **options,
        }
        return await encode_inputs(inputs, llm=llm, context=context, **wanted)

    return asyncio.run(main())


class Seeing(Tokenizer):
    """The real tokenizer, which notes what it encodes.

    Args:
        tokenizer: The real one.
        has_bound: Whether it is known how much text a token may be.
    """

    def __init__(self, tokenizer: Tokenizer, *, has_bound: bool = True) -> None:
        super().__init__(tokenizer._hf)
        self.seen: list[str] = []
        if not has_bound:
            self.max_bytes_per_token = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        self.seen.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_every_form_of_input_becomes_a_list_of_prompts(tokenizer: Tokenizer) -> None:
    hello, you = tokenizer.encode("Hello"), tokenizer.encode("you")
    assert encode(tokenizer, "Hello") == [hello]
    assert encode(tokenizer, ["Hello", "you"]) == [hello, you]
    assert encode(tokenizer, [5, 6]) == [(5, 6)]
    assert encode(tokenizer, [[5, 6], [7]]) == [(5, 6), (7,)]


def test_a_text_that_is_surely_too_long_is_refused_before_any_is_encoded(tokenizer: Tokenizer) -> None:
    most = tokenizer.max_bytes_per_token
    assert most is not None
    seeing = Seeing(tokenizer)
    with pytest.raises(ApiError, match=r"prompt\[1\] has 17 tokens or more: .* 16 tokens") as caught:
        encode(seeing, ["x", "é" * (8 * most + 1)])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt[1]")
    assert not seeing.seen
    assert encode(tokenizer, "x" * 4097, is_cut=True) == [tokenizer.encode("x" * 4097)]


def test_where_no_bound_is_known_a_text_may_have_so_many_characters(tokenizer: Tokenizer) -> None:
    seeing = Seeing(tokenizer, has_bound=False)
    with pytest.raises(ApiError, match="has 4097 characters"):
        encode(seeing, "x" * 4097)
    assert not seeing.seen


def test_of_a_text_whose_beginning_is_far_too_long_the_rest_is_not_encoded(tokenizer: Tokenizer) -> None:
    seeing = Seeing(tokenizer)
    seeing.max_bytes_per_token = 128  # as in vocabularies with runs of spaces
    with pytest.raises(ApiError, match=r"prompt has more than \d+ tokens: .* 16 tokens"):
        encode(seeing, "the sea " * 100)
    assert [len(text) for text in seeing.seen] == [256]
    with pytest.raises(ApiError, match=r"prompt has \d+ tokens"):
        encode(seeing, "the sea " * 32)  # not so long that two attempts would be worth it


def test_a_list_is_refused_at_the_first_prompt_that_is_too_long(tokenizer: Tokenizer) -> None:
    seeing = Seeing(tokenizer)
    with pytest.raises(ApiError, match=r"prompt\[1\] has \d+ tokens"):
        encode(seeing, ["x", "the sea " * 14, *["x"] * 1000])
    assert len(seeing.seen) == 2


@pytest.mark.parametrize(
    ("limits", "num_seen", "message"),
    [
        ({"max_requests": 3}, 0, "4 texts in one request"),
        ({"max_requests": 6, "caller_share": 0.5}, 0, "one API key may have 3 at once"),
        ({"max_waiting_tokens": 3}, 0, "4 prompt tokens in one request"),
        ({"max_waiting_tokens": 6}, 2, "prompt tokens in one request: the server lets 6 wait"),
    ],
)
def test_what_would_fit_no_empty_server_is_refused_when_that_is_known(
    tokenizer: Tokenizer, limits: Any, num_seen: int, message: str
) -> None:
    seeing = Seeing(tokenizer)
    with pytest.raises(InvalidRequestError, match=message):
        encode(seeing, ["xyzw"] * 4, limits=limits)
    assert len(seeing.seen) == num_seen


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"),
    [(None, 4, 12), (3, 4, 3), (99, 4, 12), (-1, 4, 6), (-1, None, 9), (-1, 99, 1), (0, 4, 0)],
)
@pytest.mark.representatives(7)
def test_truncation_keeps_the_end(tokenizer: Tokenizer, limit: int | None, max_tokens: int | None, kept: int) -> None:
    prompt = tuple(range(12))
    result = truncated(prompt, limit, tokenizer=tokenizer, max_model_len=10, max_tokens=max_tokens)
    assert result == prompt[12 - kept :]


@pytest.mark.parametrize(
    ("prompt", "limit", "kept"),
    [
        ((1, 5, 6, 7, 8, 9), 4, (1, 7, 8, 9)),
        ((1, 5, 6, 7, 8, 9), -1, (1, 7, 8, 9)),
        ((1, 5, 6, 7, 8, 9), 1, (9,)),  # no room for more than it
        ((1, 5, 6, 7, 8, 9), 6, (1, 5, 6, 7, 8, 9)),
        ((5, 6, 7, 8, 9), 3, (7, 8, 9)),  # it does not begin with it
        ((1,), 1, (1,)),
    ],
)
@pytest.mark.representatives(7)
def test_truncation_keeps_the_beginning_of_sequence(prompt: tuple[int, ...], limit: int, kept: tuple[int, ...]) -> None:
    tokenizer: Any = SimpleNamespace(opening=(1,))
    assert truncated(prompt, limit, tokenizer=tokenizer, max_model_len=6, max_tokens=2) == kept


LENGTH = "this model's maximum context length is 10 tokens, prompt and output together."


@pytest.mark.parametrize(
    ("sizes", "options", "param", "message"),
    [
        ([9], {"num_output": 1}, None, ""),
        ([10], {"num_output": 0}, None, ""),
        ([4], {"num_output": 6}, None, ""),
        (
            [4, 10],
            {"num_output": 1},
            "prompt[1]",
            f"prompt[1] has 10 tokens, and at least 1 more is wanted: {LENGTH} Shorten",
        ),
        (
            [4],
            {"num_output": 7},
            "prompt",
            f"prompt has 4 tokens, and max_tokens asks for 7 more: {LENGTH} Shorten the ",
        ),
        ([1], {"num_output": 10, "output_param": "a"}, "a", f"a asks for 10 tokens: {LENGTH} Lower or leave out a."),
        ([1, 0], {"num_output": 0}, "prompt[1]", "prompt[1] has no tokens"),
        ([1], {"num_output": 1, "max_model_len": 1}, "prompt", "prompt has 1 token, and at least 1 more is wanted: "),
    ],
)
@pytest.mark.representatives(8)
def test_a_prompt_may_fill_all_but_the_room_for_the_output(sizes: Any, options: Any, param: Any, message: str) -> None:
    options = {"max_model_len": 10, "param": "prompt", **options}
    prompts = [(1,) * size for size in sizes]
    if param is None:
        check_room(prompts, **options)
        return
    with pytest.raises(ApiError) as caught:
        check_room(prompts, **options)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "Hello"}, [None]),
        ({"prompt": "Hello", "echo": True}, ["Hello"]),
        ({"prompt": ["Hello", "you"], "echo": True}, ["Hello", "you"]),
        ({"prompt": "Hello", "echo": True, "truncate_prompt_tokens": 1}, [None]),
    ],
)
def test_an_echo_is_the_text_as_it_came_unless_it_was_cut(tokenizer: Tokenizer, body: Any, expected: Any) -> None:
    request = CompletionRequest(model="m", **body)
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    prompts = [tokenizer.encode(str(text)) for text in texts]
    if request.truncate_prompt_tokens:
        prompts = [prompt[-1:] for prompt in prompts]
        expected = [tokenizer.decode(prompt) for prompt in prompts]
    assert echoes(request, prompts, tokenizer) == expected


class Counting(FairThreads):
    """Notes how much work it is given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[int] = []

    async def run_all(self, calls: Any, *, caller: str = "") -> Any:
        self.pieces += [num_characters for _, num_characters in calls]
        return await super().run_all(calls, caller=caller)


def test_a_list_is_encoded_in_pieces_between_which_others_come(tokenizer: Tokenizer) -> None:
    threads = Counting()
    assert encode(tokenizer, ["the sea"] * 1000, threads=threads) == [tokenizer.encode("the sea")] * 1000
    assert threads.pieces == [71 * 924, 71 * 76]  # 64 for each text, for it takes time besides its characters'
