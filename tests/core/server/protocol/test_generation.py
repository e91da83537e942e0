from __future__ import annotations

from trencadis.records import SamplingParams
from trencadis.server.protocol.generation import GenerationRequest


def test_one_stop_string_and_several_are_read_alike() -> None:
    assert GenerationRequest(model="m").stops == ()
    assert GenerationRequest(model="m", stop="a").stops == ("a",)
    assert GenerationRequest(model="m", stop=["a", "b"]).stops == ("a", "b")


def test_one_choice_is_the_default() -> None:
    assert GenerationRequest(model="m").num_choices == SamplingParams().n == 1
    assert GenerationRequest(model="m", n=3).num_choices == 3


def test_whatever_the_ranges_allow_sampling_allows_too() -> None:
    schema = GenerationRequest.model_json_schema()["properties"]
    for name in ("n", "temperature", "top_k", "min_p", "frequency_penalty", "presence_penalty"):
        (range_,) = [one for one in schema[name]["anyOf"] if one["type"] != "null"]
        for bound in ("minimum", "maximum"):
            SamplingParams(**{name: range_[bound]})
