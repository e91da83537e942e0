from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.broken_tokenizers import panics_at_a_token, panics_at_texts
from trencadis.client.llm import LLM
from trencadis.config import Config
from trencadis.errors import InvalidRequestError, PromptTooLongError, RequestRefusedError
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import BeamSearchParams, FinishReason, Request, RequestTerms, SamplingParams
from trencadis.registry import Registry
from trencadis.text import Tokenizer
from trencadis_testing.fakes import fake_text

VOCAB_SIZE = 4096
FOUR = SamplingParams(max_tokens=4)
House = Callable[..., tuple[Config, Registry]]


class OnlyTwoWait(SchedulingPolicy):
    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "two wait already" if num_waiting >= 2 else ""


@pytest.fixture
def llm(fake_house: House) -> Iterator[LLM]:
    with LLM.from_config(*fake_house()) as made:
        yield made


def reference(prompt: tuple[int, ...] | list[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(fake_text(prompt, num_tokens, vocab_size=VOCAB_SIZE))


def test_outputs_come_in_the_order_of_the_prompts_whichever_is_done_first(llm: LLM) -> None:
    prompts = [[5, 6], "Hello there", [7]]
    params = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=1), SamplingParams(max_tokens=5)]
    outputs = llm.generate(prompts, params)
    ids = [(5, 6), llm.tokenizer.encode("Hello there"), (7,)]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == [
        reference(prompt, one.max_tokens or 0) for prompt, one in zip(ids, params, strict=True)
    ]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompts", ["Hello there", [5, 6, 7], (5, 6, 7)])
def test_one_prompt_gives_one_output(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, FOUR)
    assert output.outputs[0].token_ids == reference(output.prompt_token_ids, 4)


@pytest.mark.parametrize("params", [5, "hot", {"temperature": 1}])
def test_what_is_no_sampling_params_is_shown_with_the_right_form(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("Hello", params)
    assert str(caught.value) == (
        f"sampling_params = {params!r}: no SamplingParams. Give SamplingParams(temperature=0.7, max_tokens=64), for instance."
    )


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, ["hi"], 5, None])
def test_what_is_no_chat_is_shown_whole(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages(\[0\])? = .*(hi|5|None).* Give \["):
        llm.chat(messages)


BAD_PROMPTS = [
    ("", "no tokens"),
    ([], "empty prompt"),
    ([5, "x"], "neither text nor"),
    ([VOCAB_SIZE], "outside"),
    ([6] * 256, "255"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_PROMPTS)
def test_a_prompt_that_cannot_be_served_is_ignored_and_the_others_run(llm: LLM, bad: Any, why: str) -> None:
    first, ignored, last = llm.generate([[5], bad, [7]], FOUR)
    assert [one.outputs[0].token_ids for one in (first, last)] == [reference([5], 4), reference([7], 4)]
    assert ignored.finished
    assert (ignored.outputs[0].finish_reason, ignored.outputs[0].token_ids) == (FinishReason.IGNORED, ())
    assert why in ignored.error
    assert not first.error


@pytest.mark.parametrize(("bad", "why"), BAD_PROMPTS)
def test_a_list_can_be_refused_whole_and_nothing_of_it_runs(llm: LLM, bad: Any, why: str) -> None:
    with pytest.raises((InvalidRequestError, PromptTooLongError), match=rf"prompts\[1\].*{why}"):
        llm.generate([[5], bad, [7]], FOUR, on_refusal="raise")
    assert llm.totals()["num_emitted_tokens"] == 0
    assert llm.generate([5], FOUR)[0].outputs[0].token_ids == reference([5], 4)


def test_only_the_two_answers_to_a_refusal_exist(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r'on_refusal = .skip.*"ignore" or "raise"'):
        llm.generate([[5]], FOUR, on_refusal="skip")  # type: ignore[arg-type]


def test_a_refusal_by_the_policy_takes_back_the_prompts_before_it(fake_house: House) -> None:
    with LLM.from_config(*fake_house(policy=OnlyTwoWait)) as llm:
        with pytest.raises(RequestRefusedError, match=r"prompts\[2\].*two wait already"):
            llm.generate([[5], [6], [7]], FOUR, on_refusal="raise")
        ignored = llm.generate([[5], [6], [7], [8]], FOUR)
        reasons = [one.outputs[0].finish_reason for one in ignored]
        assert reasons == [FinishReason.LENGTH] * 2 + [FinishReason.IGNORED] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampling_params": [FOUR]},
        {"priorities": [1]},
        {"tenants": ["a", "b", "c"]},
        {"cache_salts": ["a"]},
        {"weights": [1.0]},
        {"ttft_targets_s": [1.0]},
        {"tpot_targets_s": []},
        {"transfer_params": [{}]},
    ],
)
def test_parameters_and_terms_must_match_the_prompts(llm: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(arguments))} has .* for 2 prompts"):
        llm.generate([[5], [6]], **arguments)


class Notes(SchedulingPolicy):
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def on_added(self, *, slot: int, request: Request) -> None:
        self.requests.append(request)


def test_terms_reach_the_policy_one_for_all_or_one_for_each_prompt(fake_house: House) -> None:
    policy = Notes()
    with LLM.from_config(*fake_house(policy=lambda: policy)) as llm:
        llm.generate(
            [[5], [6]],
            FOUR,
            priorities=[3, 1],
            tenants="acme",
            cache_salts=["x", "y"],
            weights=2,
            ttft_targets_s=[0.5, math.inf],
            tpot_targets_s=0.25,
        )
        next(
            llm.stream([7], FOUR, priority=2, tenant="t", cache_salt="z", weight=3.0, ttft_target_s=1, tpot_target_s=2)
        )
    first, second, streamed = policy.requests
    assert [(one.priority, one.tenant, one.weight) for one in (first, second)] == [(3, "acme", 2), (1, "acme", 2)]
    assert [(one.cache_salt, one.ttft_target_s, one.tpot_target_s) for one in (first, second)] == [
        ("x", 0.5, 0.25),
        ("y", math.inf, 0.25),
    ]
    assert (streamed.priority, streamed.tenant, streamed.cache_salt, streamed.weight) == (2, "t", "z", 3.0)
    assert (streamed.ttft_target_s, streamed.tpot_target_s) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1, 0]}, r"prompts\[1\]: weight = 0 is impossible"),
        ({"ttft_targets_s": "soon"}, r"prompts\[0\]: ttft_target_s = 'soon' is impossible"),
        ({"priorities": 0.5}, r"prompts\[0\]: priority = 0.5 is impossible"),
    ],
)
def test_impossible_terms_are_refused_with_the_prompts_index(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([[5], [6]], FOUR, **arguments)
    assert len(llm.generate([[5], [6]], FOUR)) == 2


def test_a_chat_is_its_template_generated(llm: LLM, tokenizer: Tokenizer) -> None:
    hello, bye = ([{"role": "user", "content": text}] for text in ("Hello", "Bye"))
    (single,) = llm.chat(hello, FOUR)
    assert tokenizer.decode(single.prompt_token_ids) == "<|user|>Hello<|end|><|assistant|>"
    several = llm.chat([hello, bye], FOUR)
    assert [output.outputs[0].token_ids for output in several] == [
        reference(output.prompt_token_ids, 4) for output in several
    ]
    *_, last = llm.stream_chat(hello, FOUR)
    assert last.outputs == single.outputs


def test_a_stream_yields_growing_outputs(llm: LLM) -> None:
    outputs = list(llm.stream([5, 6], FOUR))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert outputs[-1].outputs[0].token_ids == reference([5, 6], 4)


def test_streams_run_together_whichever_is_read(llm: LLM) -> None:
    first, second = llm.stream([5], FOUR), llm.stream([6], FOUR)
    *_, end_of_second = second
    assert end_of_second.outputs[0].token_ids == reference([6], 4)
    (only,) = first
    assert only.outputs[0].token_ids == reference([5], 4)


def test_generate_leaves_an_open_stream_alone(llm: LLM) -> None:
    stream = llm.stream([5], SamplingParams(max_tokens=40))
    next(stream)
    llm.generate([6], FOUR)
    *_, last = stream
    assert last.outputs[0].token_ids == reference([5], 40)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_stream_that_nobody_reads_any_more_is_ended(llm: LLM, how: str) -> None:
    stream: Any = llm.stream([5], SamplingParams(max_tokens=200))
    next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    llm.generate([6], SamplingParams(max_tokens=1))
    assert llm._frontend.live == ()
    assert llm._frontend.engine.engine.num_running == 0


def test_closing_ends_streams_and_refuses_prompts(fake_house: House) -> None:
    llm = LLM.from_config(*fake_house())
    stream = llm.stream([5], SamplingParams(max_tokens=200))
    next(stream)
    llm.close()
    llm.close()
    *_, last = stream
    assert last.outputs[0].finish_reason is FinishReason.ABORT
    with pytest.raises(InvalidRequestError, match="closed"):
        llm.generate([5])


def test_an_interrupted_run_leaves_nothing_in_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._frontend, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], FOUR)
    assert llm._frontend.live == ()
    assert llm.generate([5], FOUR)[0].finished


def test_beam_search_gives_the_best_of_each_prompt_in_order(llm: LLM) -> None:
    two = BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True)
    three = BeamSearchParams(beam_width=3, n=1, max_tokens=4, ignore_eos=True)
    first, second = llm.beam_search(["Hello there", [7]], [two, three])
    # The fake backend offers tokens 0, 1, 2 ... each with log-probability -1.
    assert first.prompt == "Hello there"
    assert [one.token_ids for one in first.outputs] == [(0, 0), (0, 1)]
    assert [(one.token_ids, one.score) for one in second.outputs] == [((0, 0, 0, 0), -1.0)]


def test_transfer_parameters_reach_the_connector_and_its_answer_comes_back(fake_house: House) -> None:
    from support.kv.echo_connector import EchoConnector

    with LLM.from_config(*fake_house(connector=EchoConnector())) as llm:
        both = llm.generate([[5], [6]], FOUR, transfer_params=[{"a": 1}, None])
        several = llm.generate([7], SamplingParams(max_tokens=4, n=2), transfer_params={"b": 2})
        *_, streamed = llm.stream([8], FOUR, transfer_params={"c": 3})
    assert [one.transfer_params for one in both] == [{"asked": {"a": 1}, "prompt": [5]}, None]
    assert several[0].transfer_params == {"asked": {"b": 2}, "prompt": [7]}
    assert streamed.transfer_params == {"asked": {"c": 3}, "prompt": [8]}


def test_beams_hand_no_prefix_over(fake_house: House) -> None:
    from support.kv.echo_connector import EchoConnector

    echo = EchoConnector()
    seen: list[Any] = []
    echo.scheduler.finished_params = lambda request: seen.append(request.transfer_params)  # type: ignore[method-assign]
    with LLM.from_config(*fake_house(connector=echo)) as llm:
        llm.beam_search([5], BeamSearchParams(beam_width=2, max_tokens=3), terms=RequestTerms(transfer_params={"a": 1}))
    assert set(seen) == {None}


def test_request_that_never_reaches_the_engine_is_told_to_the_connector(fake_house: House) -> None:
    from support.kv.echo_connector import EchoConnector

    echo = EchoConnector()
    with LLM.from_config(*fake_house(connector=echo)) as llm:
        (ignored,) = llm.generate([[5, "x"]], FOUR, transfer_params={"a": 1})  # type: ignore[list-item]
        assert ignored.outputs[0].finish_reason is FinishReason.IGNORED
    assert echo.rejected == [{"a": 1}]


def test_a_tokenizer_that_panics_at_a_text_refuses_this_prompt_alone(fake_house: House, tmp_path: Path) -> None:
    with LLM.from_config(*fake_house(tokenizer=panics_at_texts(tmp_path))) as llm:
        with pytest.raises(InvalidRequestError, match="the tokenizer failed"):
            llm.generate("Hello", FOUR)
        refused, other = llm.generate(["Hello", [5]], FOUR)
    assert (refused.outputs[0].finish_reason, other.outputs[0].token_ids) == (
        FinishReason.IGNORED,
        reference([5], 4),
    )


def test_a_tokenizer_that_panics_at_an_output_fails_this_request_alone(
    fake_house: House, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    letters = {tokenizer.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"}
    prompt, token = next((n, first) for n in range(4, 4096) if (first := reference([n], 1)[0]) in letters)
    other = next(n for n in range(4, 4096) if token not in reference([n], 4))
    directory = panics_at_a_token(tmp_path, tokenizer.decode([token]))
    with LLM.from_config(*fake_house(tokenizer=directory)) as llm:
        failed, fine = llm.generate([[prompt], [other]], FOUR)
        last = list(llm.stream([prompt], FOUR))[-1]
    for one in (failed, last):
        assert one.outputs[0].finish_reason is FinishReason.ERROR
        assert "the tokenizer failed" in one.error
    assert fine.outputs[0].token_ids == reference([other], 4)
