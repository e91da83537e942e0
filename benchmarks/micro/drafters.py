"""What drafting without a model costs, and how often its drafts are right.

    python benchmarks/micro/drafters.py [--data ../shared/data] [--only cost|replay] [--json]

Cost: CPU time of ``propose`` per sequence, with 8192 tokens of history and one or two new tokens each step, 32 sequences a call.
Replay: a reply that is known is served as if a model wrote it, so a draft stands if it is what comes next. Prompts and replies are
those of ``prompts/gsm8k_test.jsonl``, passages of ``corpus/gutenberg_lcet10.txt`` with what follows, and the same passages with
the instruction to repeat them with one word changed; the tokenizer is the demo model's. No time is measured there: figures are exact.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tokenizers import Tokenizer

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.registry import Registry
from trencadis_testing.speculation import draft_view

HISTORY = 8192
BATCH = 32

Reply = tuple[list[int], list[int]]
"""Token ids of a prompt, and of what was answered."""

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("ngram", {}),
    "ngram, earliest": ("ngram", {"occurrence": "earliest"}),
    "ngram, stops at the end": ("ngram", {"continue_period": False}),
    "ngram, at most 8": ("ngram", {"max_draft_tokens": 8}),
    "ngram, n = 5": ("ngram", {"min_match": 5, "max_match": 5, "max_draft_tokens": 5}),
    "suffix": ("suffix", {}),
    "suffix, sequence alone": ("suffix", {"max_cached_requests": 0}),
    "suffix, factor 2": ("suffix", {"factor": 2.0}),
    "suffix, min_prob 0.3": ("suffix", {"min_prob": 0.3}),
    "suffix, tree": ("suffix", {"tree": True}),
    "mixed": ("mixed", {}),
}


def make(name: str, options: dict[str, Any]) -> Speculator:
    """Return a new speculator."""
    registry = Registry.discover()
    components = registry.components("speculation")

    def build(noun: str, name: str, **options: Any) -> Any:
        return registry.build(components[name], components[name].component.config(**options), context)

    context = ComponentContext(clock=SimulatedClock(), seed=0, make=build)
    return build("speculation", name, **options)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------- cost


def cost(
    name: str, texts: Sequence[Sequence[int]], *, rounds: int, past: Iterable[Sequence[int]] = ()
) -> dict[str, float]:
    """Return microseconds per sequence and call: the first with the whole history, and those with new tokens."""
    speculator = make(name, {})
    for text in past:
        speculator.propose(draft_view([text[:2]], slots=[BATCH]))
        speculator.on_finished(slot=BATCH, token_ids=np.array(text, np.int32))
    full = [np.array(text, np.int32) for text in texts]
    view = draft_view([text[:HISTORY] for text in texts], most=speculator.max_draft_tokens)
    first = spent(speculator, view)
    for _ in range(HISTORY // 2048):
        speculator.propose(view)  # a long history may be learnt in several calls
    times, length = [], HISTORY
    for i in range(rounds):
        length += 1 + i % 2
        times.append(spent(speculator, attrs.evolve(view, token_ids=tuple(text[:length] for text in full))))
    per = 1e6 / len(texts)
    return {
        "first_us": round(first * per, 1),
        "median_us": round(statistics.median(times) * per, 2),
        "mean_us": round(statistics.fmean(times) * per, 2),
        "p99_us": round(sorted(times)[int(len(times) * 0.99)] * per, 2),
    }


def spent(speculator: Speculator, view: DraftView) -> float:
    start = time.process_time()
    speculator.propose(view)
    return time.process_time() - start


def costs(book: Sequence[int], *, rounds: int) -> list[dict[str, Any]]:
    length = HISTORY + 2 * rounds
    texts = {
        "a book": [book[i * 2000 : i * 2000 + length] for i in range(BATCH)],
        "random tokens": [np.random.default_rng(i).integers(0, 4096, length).tolist() for i in range(BATCH)],
        "seven tokens repeated": [
            list(itertools.islice(itertools.cycle(range(i, i + 7)), length)) for i in range(BATCH)
        ],
    }
    past = [book[80_000 + i * 200 : 80_200 + i * 200] for i in range(250)]
    return [
        {"text": text, "drafter": name} | cost(name, sequences, rounds=rounds, past=past)
        for text, sequences in texts.items()
        for name in ("ngram", "suffix", "mixed")
    ]


# ----------------------------------------------------------------------------------------------------------- replay


def replay(speculator: Speculator, replies: Sequence[Reply]) -> dict[str, float]:
    """Serve replies one after the other; returns tokens per step, the share of drafts that stood, and drafts per step."""
    num_steps = num_tokens = num_drafted = num_accepted = 0
    for epoch, (prompt, reply) in enumerate(replies, start=1):
        known, end = [*prompt, reply[0]], len(prompt) + len(reply)
        whole = [*prompt, *reply]
        view = draft_view([prompt], slots=[0], epochs=[epoch])
        while len(known) < end:
            most = min(speculator.max_draft_tokens, end - len(known) - 1)
            accepted = 0
            if most:
                asked = attrs.evolve(
                    view,
                    token_ids=(np.array(known, np.int32),),
                    max_draft_tokens=np.array([most], np.int32),
                )
                drafts = speculator.propose(asked)
                accepted = standing(drafts, whole[len(known) :])
                num_drafted += int(drafts.num_drafts[0])
                speculator.on_verified(
                    slots=view.slots, num_drafts=drafts.num_drafts, num_accepted=np.array([accepted], np.int32)
                )
            known = whole[: len(known) + accepted + 1]
            num_steps, num_tokens, num_accepted = num_steps + 1, num_tokens + accepted + 1, num_accepted + accepted
        speculator.on_finished(slot=0, token_ids=np.array(reply, np.int32))
    return {
        "tokens_per_step": round(num_tokens / num_steps, 3),
        "acceptance": round(num_accepted / max(num_drafted, 1), 3),
        "drafts_per_step": round(num_drafted / num_steps, 2),
    }


def standing(drafts: Any, truth: Sequence[int]) -> int:
    """Return how many drafts stand: the longest path from the root that is true."""
    tokens = drafts.token_ids.tolist()
    parents = range(-1, len(tokens) - 1) if drafts.parents is None else drafts.parents.tolist()
    at, num_accepted = -1, 0
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == truth[num_accepted]:
            at, num_accepted = i, num_accepted + 1
    return num_accepted


def workloads(data: Path, tokenizer: Any, book: Sequence[int]) -> dict[str, list[Reply]]:
    lines = (data / "prompts" / "gsm8k_test.jsonl").read_text().splitlines()[:300]
    sums = [(entry["question"], entry["answer"]) for entry in map(json.loads, lines)]
    passages = [list(book[i * 1200 : i * 1200 + 1000]) for i in range(60)]
    changed = [[*part[:200], 7, *part[201:350], 9, 11, *part[352:500]] for part in passages]
    return {
        "gsm8k": [(tokenizer.encode(question).ids, tokenizer.encode(answer).ids) for question, answer in sums],
        "book": [(part[:600], part[600:]) for part in passages],
        "quote and edit": [(part[:500], edited) for part, edited in zip(passages, changed, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", choices=("cost", "replay"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(resources.files("trencadis") / "demo" / "target" / "tokenizer.json"))
    book = tokenizer.encode((args.data / "corpus" / "gutenberg_lcet10.txt").read_text()).ids
    facts: dict[str, Any] = {}
    if args.only != "replay":
        facts["cost"] = costs(book, rounds=args.rounds)
    if args.only != "cost":
        facts["replay"] = [
            {"workload": workload, "drafter": label} | replay(make(name, options), replies)
            for workload, replies in workloads(args.data, tokenizer, book).items()
            for label, (name, options) in SETTINGS.items()
        ]
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    for part, rows in facts.items():
        print(part)
        for row in rows:
            print(
                "  " + "  ".join(f"{value:<24}" if isinstance(value, str) else f"{value:9}" for value in row.values())
            )


if __name__ == "__main__":
    main()
