from __future__ import annotations

import pytest

from trencadis.errors import InvalidRequestError
from trencadis.records import BeamSearchParams


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"beam_width": 0}, "beam_width = 0 is impossible: it must be a whole number from 1 to 49"),
        ({"beam_width": 50}, "beam_width = 50"),
        ({"beam_width": True}, "beam_width = True"),
        ({"n": 5}, "n = 5 is impossible: it must be at most beam_width = 4"),
        ({"n": 0}, "n = 0"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"length_penalty": float("nan")}, "length_penalty = nan"),
        ({"length_penalty": 11}, "a number from -10 to 10"),
        ({"early_stopping": "always"}, 'True, False or "never"'),
        ({"early_stopping": 1}, "early_stopping = 1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprobs": 5}, "logprobs = 5 is impossible: it must be at most beam_width = 4"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(given: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        BeamSearchParams(**given)  # type: ignore[arg-type]


def test_all_beams_are_returned_unless_fewer_are_asked_for() -> None:
    assert BeamSearchParams(beam_width=3).num_returned == 3
    assert BeamSearchParams(beam_width=3, n=2).num_returned == 2
