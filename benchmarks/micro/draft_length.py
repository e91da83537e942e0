"""What the choice of draft lengths costs a step: microseconds of one call, by policy, layout and number of sequences.

    python benchmarks/micro/draft_length.py [--json]

The contract allows 20 µs and 1 µs for each sequence. The fastest of many rounds counts: what another process took is no cost of the
policy. Learning from a step is measured beside it; it comes after the step, and counts against the next one all the same.
"""

from __future__ import annotations

import argparse
import json
import timeit
from typing import Any

import numpy as np

from trencadis.interfaces import DraftLength
from trencadis_plugins.draft_length.fixed import Fixed
from trencadis_plugins.draft_length.goodput import Goodput
from trencadis_plugins.draft_length.table import Table
from trencadis_testing.draft_length import length_view, verified_step

POLICIES: dict[str, type[DraftLength]] = {"fixed": Fixed, "table": Table, "goodput": Goodput}
NUM_DRAFTS = 4


def cost(name: str, num_sequences: int, *, pads: bool, rounds: int) -> dict[str, Any]:
    policy = POLICIES[name]()
    rng = np.random.default_rng(num_sequences)
    view = length_view([NUM_DRAFTS] * num_sequences, pads=pads)
    step = verified_step(view, [0] * num_sequences, [0] * num_sequences)
    for _ in range(60):
        policy.on_verified(step)
        chosen = policy.choose(view)
        accepted = rng.integers(0, chosen + 1).tolist()
        step = verified_step(view, chosen, accepted, step_s=1e-2 + 1e-5 * float(chosen.sum()))
    calls = 200
    choose = min(timeit.repeat(lambda: policy.choose(view), number=calls, repeat=rounds)) / calls
    learn = min(timeit.repeat(lambda: policy.on_verified(step), number=calls, repeat=rounds)) / calls
    return {
        "policy": name,
        "layout": "padded" if pads else "ragged",
        "num_sequences": num_sequences,
        "choose_us": round(choose * 1e6, 1),
        "learn_us": round(learn * 1e6, 1),
        "allowed_us": 20 + num_sequences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    cost("goodput", 1, pads=False, rounds=1)
    rows = [
        cost(name, n, pads=pads, rounds=args.rounds)
        for name in POLICIES
        for pads in (False, True)
        for n in (1, 8, 32, 256)
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            "{policy:8} {layout:6} {num_sequences:4} sequences  choose {choose_us:6} us (allowed {allowed_us}), "
            "learn {learn_us:6} us".format(**row)
        )


if __name__ == "__main__":
    main()
