from __future__ import annotations

from trencadis.client.commands import AskMetrics, Embed


def test_every_question_has_an_answer_of_its_own() -> None:
    first, second = Embed(prompts=("a",), request_id="x"), Embed(prompts=("a",), request_id="x")
    assert first != second
    assert first.future is not second.future
    assert AskMetrics().future is not AskMetrics().future
