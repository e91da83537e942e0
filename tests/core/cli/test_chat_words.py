"""A conversation and the words that change it, on a fake backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from trencadis.cli.chat_words import obey
from trencadis.cli.conversation import Conversation, check_one_answer
from trencadis.client.llm import LLM
from trencadis.config import Config
from trencadis.errors import InvalidRequestError, PromptTooLongError
from trencadis.records import SamplingParams
from trencadis.registry import Registry

House = Callable[..., tuple[Config, Registry]]


@pytest.fixture
def llm(fake_house: House) -> Iterator[LLM]:
    with LLM.from_config(*fake_house()) as made:
        yield made


@pytest.fixture
def conversation(llm: LLM) -> Conversation:
    return Conversation(llm, SamplingParams(max_tokens=4, temperature=0.0))


def test_each_message_follows_what_was_said_and_the_prefix_cache_has_it(llm: LLM) -> None:
    talk = Conversation(llm, SamplingParams(max_tokens=40, temperature=0.0))
    first = "".join(talk.answer("Who is there, so late at night, and in this rain?"))
    assert first
    assert talk.was_cut
    assert llm.totals()["num_prompt_tokens_cached"] == 0
    assert "".join(talk.answer("And who else?"))
    assert talk.num_messages == 4
    assert llm.totals()["num_prompt_tokens_cached"] > 0


def test_a_reset_makes_the_next_answer_that_of_a_new_conversation(conversation: Conversation) -> None:
    first = "".join(conversation.answer("Who is there?"))
    assert "".join(conversation.answer("Who is there?")) != first
    assert obey("/reset", conversation) == "Nothing was said so far."
    assert conversation.num_messages == 0
    assert "".join(conversation.answer("Who is there?")) == first


def test_an_answer_that_is_stopped_counts_as_far_as_it_came(conversation: Conversation) -> None:
    conversation.params = SamplingParams(max_tokens=400, temperature=0.0)
    asked: list[bool] = []

    def stops() -> bool:
        asked.append(True)
        return len(asked) > 2

    assert len(list(conversation.answer("Who is there?", stops=stops))) == 3
    assert conversation.num_messages == 2


def test_a_message_that_is_refused_was_not_said(conversation: Conversation) -> None:
    with pytest.raises(PromptTooLongError):
        list(conversation.answer("word " * 5000))
    assert conversation.num_messages == 0


def test_the_system_message_is_told_first(conversation: Conversation) -> None:
    plain = "".join(conversation.answer("Who is there?"))
    obey("/reset", conversation)
    assert obey("/system You are a king.", conversation) == "system: You are a king."
    assert "".join(conversation.answer("Who is there?")) != plain
    assert obey("/system", conversation) == "system: You are a king."
    assert obey("/system none", conversation) == "system: none"


@pytest.mark.representatives(10)
@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("/set temperature 0.7", "temperature = 0.7"),
        ("/set max-tokens none", "max_tokens = none"),
        ("/set top_k 5", "top_k = 5"),
        ("/set ignore_eos true", "ignore_eos = true"),
        ("/set stop THE END", "stop = ('THE END',)"),
        ("/set logit_bias 5=-3", "logit_bias = {5: -3.0}"),
        ("/set min_p", "min_p = 0.0"),
        ("/set", "temperature = 0.0\nmax_tokens = 4"),
    ],
)
def test_parameters_are_set_and_shown(conversation: Conversation, line: str, printed: str) -> None:
    assert obey(line, conversation) == printed


@pytest.mark.representatives(10)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temprature 2", 'no sampling parameter "temprature" can be set. Did you mean "temperature"?'),
        ("/set num_predict 2", 'Did you mean "max_tokens"?'),
        ("/set n 2", 'no sampling parameter "n" can be set.'),
        ("/set temperature hot", "sampling parameter temperature = 'hot' is impossible: it must be a number."),
        ("/set max_tokens 1.5", "max_tokens = '1.5' is impossible: it must be a whole number or none."),
        ("/set ignore_eos maybe", "ignore_eos = 'maybe' is impossible: it must be true or false."),
        ("/set temperature -1", "temperature = -1.0 is impossible: it must be a number from 0 to 100"),
        ("/rest", 'there is no word "/rest". Did you mean "/reset"? /exit leaves, /help lists all.'),
        ("/reset now", '/reset takes nothing, and "now" was given.'),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(conversation: Conversation, line: str, said: str) -> None:
    before = conversation.params
    with pytest.raises(InvalidRequestError) as caught:
        obey(line, conversation)
    assert said in str(caught.value)
    assert conversation.params == before


def test_help_lists_every_word(conversation: Conversation) -> None:
    printed = obey("/help", conversation)
    assert all(word in printed for word in ("/reset", "/system", "/set", "/help", "/exit", "Ctrl-C", "Ctrl-D"))
    assert max(map(len, printed.splitlines())) < 80


@pytest.mark.parametrize("params", [SamplingParams(n=2), SamplingParams(best_of=2)])
def test_there_is_one_answer_to_each_message(params: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError, match="one answer to each message"):
        check_one_answer(params)


def test_a_model_without_a_template_cannot_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llm.tokenizer), "find_template", lambda *_, **__: "")
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Conversation(llm, SamplingParams())
