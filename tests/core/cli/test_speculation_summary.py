from __future__ import annotations

import pytest

from trencadis.cli.generate_command import speculation_summary


def test_it_says_what_was_drafted_and_accepted_and_what_a_step_gave() -> None:
    totals = {
        "drafter": "ngram",
        "num_draft_tokens": 40,
        "num_accepted_tokens": 30,
        "num_emitted_tokens": 50,
        "num_sequence_steps": 20,
    }
    expected = "speculation ngram: 40 tokens drafted, 30 accepted (75.0%); 2.50 tokens per step"
    assert speculation_summary("ngram", totals) == expected


def test_where_nothing_was_drafted_there_is_no_ratio() -> None:
    totals = {
        "drafter": "x",
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "num_emitted_tokens": 0,
        "num_sequence_steps": 0,
    }
    assert speculation_summary("x", totals) == "speculation x: 0 tokens drafted, 0 accepted; 0.00 tokens per step"


@pytest.mark.parametrize(
    ("now", "words"), [("suffix", "ngram, after a failure suffix:"), ("", "ngram, after a failure off:")]
)
def test_it_names_what_drafts_after_a_failure(now: str, words: str) -> None:
    totals = {"drafter": now, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    totals |= {"num_emitted_tokens": 0, "num_sequence_steps": 0}
    assert speculation_summary("ngram", totals).startswith(f"speculation {words} ")
