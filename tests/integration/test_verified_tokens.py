"""Connectors, the prefix cache and speculators get verified tokens, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from support.strategies.guesses import PROMPT, request, right, wrong
from trencadis.interfaces import DraftView, Speculator
from trencadis.records import Drafts
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


@pytest.mark.parametrize("draft", [right, wrong, lambda tokens: [*right(tokens)[:1], 3, 3]])
def test_only_verified_tokens_are_saved_by_a_connector(draft: Any) -> None:
    """A block is saved when its tokens are committed, so a new engine that loads them has the very same text."""
    connector = LoopConnector()
    engine = make_engine(
        backend=FakeBackend(eos=-1),
        speculator=ScriptedSpeculator(draft),
        connector=connector.pair(),
        prefix_caching=False,
    )
    engine.add(request("a", max_tokens=18))
    text = drain(engine)["a"].token_ids.tolist()
    assert text == fake_text(PROMPT, 18, eos=-1)
    longer = (*PROMPT, *text)
    assert len(connector.store.blocks) == (len(longer) - 1) // 4
    engine.add(request("b", longer))
    end = drain(engine)["b"]
    assert end.token_ids.tolist() == fake_text(longer, 12, eos=-1)
    assert end.num_cached_tokens == (len(longer) - 1) // 4 * 4


@pytest.mark.parametrize("draft", [right, wrong])
def test_a_connector_holds_no_block_that_only_drafts_were_given(draft: Any) -> None:
    connector = LoopConnector(holds=True)
    engine = make_engine(
        backend=FakeBackend(eos=-1),
        speculator=ScriptedSpeculator(draft),
        connector=connector.pair(),
        prefix_caching=False,
    )
    on_finished, held = connector.scheduler.on_finished, []

    def counted(request: Any, *, blocks: Any) -> Any:
        held.append(len(blocks))
        return on_finished(request, blocks=blocks)

    connector.scheduler.on_finished = counted  # type: ignore[method-assign]
    engine.stage("transfer").transfers.connector.strategy = connector.scheduler
    for length in range(1, 9):
        engine.add(request(str(length), max_tokens=20))
        while (
            engine.inspect().sequences
            and len(engine._state.known_tokens(engine._state.table.sequence(0))) < 10 + length
        ):
            engine.step()
        sequence = engine._state.table.sequences[0]
        known = len(engine._state.known_tokens(sequence))
        engine.stop(str(length))
        assert held[-1] <= -(-known // 4)
        drain(engine)
        assert engine.inspect().blocks.num_used == 0


@pytest.mark.parametrize("draft", [right, wrong])
def test_only_verified_tokens_are_found_in_the_prefix_cache(draft: Any) -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(draft))
    engine.add(request("a", max_tokens=18))
    text = drain(engine)["a"].token_ids.tolist()
    longer = (*PROMPT, *text)
    engine.add(request("b", longer))
    end = drain(engine)["b"]
    assert end.num_cached_tokens == (len(longer) - 1) // 4 * 4
    assert end.token_ids.tolist() == fake_text(longer, 12, eos=-1)


def test_speculators_see_committed_tokens_only() -> None:
    seen: list[list[int]] = []

    class Watching(Speculator):
        max_draft_tokens = 3

        def propose(self, view: DraftView) -> Drafts:
            seen.extend(tokens.tolist() for tokens in view.token_ids)
            return ScriptedSpeculator(wrong).propose(view)

    engine = make_engine(backend=FakeBackend(eos=-1), speculator=Watching())
    engine.add(request("r"))
    drain(engine)
    whole = [*PROMPT, *fake_text(PROMPT, 12, eos=-1)]
    assert seen
    assert all(tokens == whole[: len(tokens)] for tokens in seen)
