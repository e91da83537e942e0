from __future__ import annotations

from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_testing.observer import step_stats

DRAFTED, ACCEPTED = "trencadis_draft_tokens_by_position_total", "trencadis_accepted_tokens_by_position_total"


def test_drafts_are_counted_by_position_and_their_mean_length_is_that_of_all_steps():
    observer = PrometheusObserver()
    observer.on_step(
        step_stats(
            num_drafted_sequences=2,
            num_accepted_tokens=3,
            num_drafted_by_position=(2, 2),
            num_accepted_by_position=(2, 1),
        )
    )
    observer.on_step(
        step_stats(num_drafted_sequences=2, num_drafted_by_position=(2, 1, 1), num_accepted_by_position=(0, 0, 0))
    )
    found = observer.snapshot()
    assert [found[f'{DRAFTED}{{position="{i}"}}'] for i in range(3)] == [4, 3, 1]
    assert [found[f'{ACCEPTED}{{position="{i}"}}'] for i in range(3)] == [2, 1, 0]
    assert found["trencadis_mean_acceptance_length"] == 1 + 3 / 4


def test_a_step_without_drafts_changes_nothing():
    observer = PrometheusObserver()
    observer.on_step(step_stats(num_emitted_tokens=3))
    found = observer.snapshot()
    assert found["trencadis_mean_acceptance_length"] == 0
    assert not [name for name in found if name.startswith((DRAFTED, ACCEPTED))]
