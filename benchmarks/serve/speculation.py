"""What speculation saves, single stream, CPU time in interleaved pairs: the same prompts with and without it, in turn.

The text is scripted (see ``scripted_text.py``): the model computes every token, and says an answer that quotes its prompt with small
changes, or one that nobody can guess. So the ratio is that of a model that does what it was asked.

``suffix`` keeps no answers of other requests here: prompts are run several times.

    python benchmarks/serve/speculation.py > benchmarks/results/speculation.json
    python benchmarks/serve/speculation.py --model random_26m > benchmarks/results/speculation_26m.json
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import attrs
import scripted_text
from doors import RANDOM, make_random_model

import trencadis.clock
import trencadis.registry.capabilities
from trencadis.client.factory import configure
from trencadis.text import Tokenizer, load_tokenizer
from trencadis_tools.bench import SpeculationResult, SpeculationWorkload, measure_speculation

PASSAGE = """It was the White Rabbit, trotting slowly back again, and looking anxiously about as it went, as if it had lost
something; and she heard it muttering to itself 'The Duchess! The Duchess! Oh my dear paws! Oh my fur and whiskers! She'll
get me executed, as sure as ferrets are ferrets! Where can I have dropped them, I wonder?' Alice guessed in a moment that it
was looking for the fan and the pair of white kid gloves, and she very good-naturedly began hunting about for them, but they
were nowhere to be seen; everything seemed to have changed since her swim in the pool, and the great hall, with the glass
table and the little door, had vanished completely."""

Cases = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]


def quotations(tokenizer: Tokenizer) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield prompts and answers: a passage with names changed, functions with one name changed."""
    for old, new in (("Alice", "Margaret"), ("fan", "lamp"), ("Rabbit", "Sparrow"), ("ferrets", "badgers")):
        yield _edit(tokenizer, PASSAGE, old, new, f"Repeat the passage, and write {new} for {old}:")
    for source, old, new in (
        (inspect.getsource(trencadis.clock), "now_s", "seconds"),
        (inspect.getsource(trencadis.registry.capabilities), "component", "part"),
    ):
        yield _edit(tokenizer, source[:1500], old, new, f"Rename {old} to {new}:")


def _edit(tokenizer: Tokenizer, text: str, old: str, new: str, order: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tokenizer.encode(f"{order}\n{text}\n\n"), tokenizer.encode(text.replace(old, new))


def noise(tokenizer: Tokenizer, *, num_prompts: int = 6) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield prompts and answers of random tokens."""
    rng = random.Random(0)
    for _ in range(num_prompts):
        yield tuple(rng.choices(range(300, 4000), k=200)), tuple(rng.choices(range(300, 4000), k=400))


def measure(
    args: argparse.Namespace, model: str, drafter: str, options: dict[str, Any], length: str, text: str
) -> SpeculationResult:
    tokenizer = load_tokenizer(model)
    made = quotations(tokenizer) if text == "quotation" else noise(tokenizer)
    answers = dict(made)
    scripted_text.ANSWERS.clear()
    scripted_text.ANSWERS.update(answers)
    most = min(args.tokens, *map(len, answers.values()))
    tables = {
        "sampling": {"name": "standard", "standard": {"processors": ["scripted_text:Scripted"]}},
        "speculation": {"name": drafter, **options},
        "draft_length": {"name": length},
        "cache": {"prefix_caching": False},
        "observer": {"names": []},
    }
    config, registry = configure(model, config_file=None, tables=tables)
    prompts = tuple(answers) * args.rounds
    workload = SpeculationWorkload(prompts=prompts, max_tokens=most)
    return measure_speculation(config, registry, workload, drafters=[drafter])[0]


CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("A/A", "none", {}, "fixed", "quotation"),
    ("ngram, 4 drafts", "ngram", {}, "fixed", "quotation"),
    ("ngram, 8 drafts", "ngram", {"ngram": {"max_draft_tokens": 8}}, "fixed", "quotation"),
    ("ngram, 8 drafts, goodput", "ngram", {"ngram": {"max_draft_tokens": 8}}, "goodput", "quotation"),
    ("suffix", "suffix", {"suffix": {"max_cached_requests": 0}}, "fixed", "quotation"),
    ("oracle, 4 drafts", "scripted_text:Oracle", {}, "fixed", "quotation"),
    ("oracle, 8 drafts", "scripted_text:Oracle", {"options": {"max_draft_tokens": 8}}, "fixed", "quotation"),
    ("A/A, noise", "none", {}, "fixed", "noise"),
    ("ngram, goodput, noise", "ngram", {"ngram": {"max_draft_tokens": 8}}, "goodput", "noise"),
    ("suffix, goodput, noise", "suffix", {"suffix": {"max_cached_requests": 0}}, "goodput", "noise"),
    ("always wrong, fixed, noise", "scripted_text:Wrong", {}, "fixed", "noise"),
    ("always wrong, goodput, noise", "scripted_text:Wrong", {}, "goodput", "noise"),
]
"""Name, drafter, its options, draft length, text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=f"{RANDOM}: a random Llama of 26 M parameters, made for this")
    parser.add_argument("--tokens", type=int, default=256, help="most output tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="how often each prompt is run")
    parser.add_argument("--cases", nargs="*", metavar="NAME", help="some of them only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model == RANDOM:
            make_random_model(directory)
            model = directory
        results = {
            name: attrs.asdict(measure(args, model, *case))
            for name, *case in CASES
            if not args.cases or name in args.cases
        }
    facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**facts, "model": args.model, "rounds": args.rounds, "results": results}, indent=2))


if __name__ == "__main__":
    main()
