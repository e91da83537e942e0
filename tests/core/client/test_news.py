from __future__ import annotations

import attrs
import msgspec
import numpy as np

from trencadis.client.news import NO_NEWS, StepNews, news_of
from trencadis.records import FinishedSequence, FinishReason, TokenDeltas


def test_news_are_the_deltas_in_plain_numbers() -> None:
    end = FinishedSequence(
        request_id="a", slot=4, token_ids=np.array([5, 6]), finish_reason=FinishReason.LENGTH, num_prompt_tokens=3
    )
    deltas = TokenDeltas(
        slots=np.array([4, 2], np.int32),
        num_tokens=np.array([2, 1], np.int32),
        token_ids=np.array([5, 6, 7], np.int32),
        finished=(end,),
    )
    news = news_of(deltas)
    assert (news.slots, news.num_tokens, news.token_ids) == ([4, 2], [2, 1], [5, 6, 7])
    assert all(type(number) is int for number in (*news.slots, *news.num_tokens, *news.token_ids))
    assert news.finished == (end,)


def test_nothing_of_the_deltas_is_left_out() -> None:
    assert {*StepNews.__struct_fields__} == {field.name for field in attrs.fields(TokenDeltas)} | {"refused"}
    assert not any(msgspec.structs.astuple(NO_NEWS))
