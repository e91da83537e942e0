"""A real server under attack for some minutes: what becomes of it, and of the well-behaved clients beside the attack.

    python benchmarks/soak/hostile.py --minutes 5 --seed 1        # bad requests, raw HTTP, cancels; prints the figures
    python benchmarks/soak/hostile.py --seed 1 --case 1234        # one case of the series alone, with its answer
    python benchmarks/soak/hostile.py --kills 500 --seed 1        # kills and stops at random moments under load
    python benchmarks/soak/hostile.py --minutes 30 --kill-every 60  # all of it at once

Everything goes to 127.0.0.1 and ends by itself. The exit status is 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from bad_requests import KINDS, BadRequests
from clients import Attack, Attempt, GoodRequests, Witness, post, send, witness_main
from kills import MOST_BACK_S, MOST_SILENCE_S, Kills, kills_beside, run_kills
from processes import Server, Usage, priority

MOST_LOOP_GAP_S = 0.05
GAUGES_REMEMBER_S = 65.0
MOST_STEP_RATIO = 3.0
MOST_GROWTH_MIB = 64.0
LONG_LIFE_SHARE = 1 / 3
"""Of a run, from which on the growth of one engine is judged: others are ended before caches and pools are full."""
ATTACKER_NICENESS = 15
"""A machine with few cores is not to be measured by how many of them the attackers take."""
TOKEN_BUDGET = 2048
MOST_WORKERS = min(32, (os.cpu_count() or 1) + 4) + 4
"""Threads of the event loop's pool, which start as they are needed and stay, and of what works beside it."""
FLAGS = ("--server.body_timeout_s", "4", "--server.max_engine_restarts", "1000")
KILL_FLAGS = ("--server.restart_window_s", "1", "--engine.watchdog_s", "5")
"""Ends hardly count together, so that pauses stay short: it is the engine's start that is measured."""

TIMES = frozenset(
    {
        "trencadis_event_loop_held_seconds",
        "largest time of the probe",
        "largest gap of a stream",
        "longest step of the engine",
        "longest until everything was back",
        "longest time a client heard nothing",
    }
)
"""Figures that are longer on a machine that does other things."""


class Figures:
    """Lines of the report, and whether one of them was missed.

    Args:
        judges_times: Those of ``TIMES`` may be missed, too.
    """

    def __init__(self, *, judges_times: bool = True) -> None:
        self.missed: list[str] = []
        self._judges_times = judges_times

    def show(self, name: str, value: Any, *, holds: bool | None = None, wanted: str = "") -> None:
        """Print a figure; ``holds``: whether it is as wanted, None if nothing is wanted of it."""
        if name in TIMES and not self._judges_times:
            holds = None
        mark = "" if holds is None else "  [as wanted]" if holds else "  [MISSED]"
        print(f"{name + ':':<44} {value}{f' (wanted: {wanted})' if wanted else ''}{mark}")
        if holds is False:
            self.missed.append(name)

    def list(self, lines: Any, most: int = 12) -> None:
        """Print details below a figure."""
        lines = list(lines)
        for line in lines[:most]:
            print(f"    {line}")
        if len(lines) > most:
            print(f"    and {len(lines) - most} more")


def document_of(server: Server) -> Any:
    """Return the server's OpenAPI document."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/openapi.json", timeout=30) as answer:
        return json.load(answer)


@contextmanager
def witnesses(port: int, texts: dict[str, str], seconds: float | None = None) -> Iterator[list[Any]]:
    """Have well-behaved clients in a process of their own beside the block; the list has what they saw afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=witness_main, args=(port, texts, seconds, theirs), daemon=True)
    process.start()
    seen: list[Any] = []
    try:
        yield seen
    finally:
        if seconds is None:
            ours.send("end")
        if ours.poll(120 + (seconds or 0)):
            seen += ours.recv()
        process.join(10)
        if process.is_alive():
            process.kill()


def attack(server: Server, arguments: argparse.Namespace, figures: Figures) -> None:
    """Attack for so many minutes and print the figures."""
    generator = BadRequests(arguments.seed, document_of(server), tuple(arguments.only))
    embed_s = asyncio.run(_long_text(server))
    full = asyncio.run(_full_step(server))  # first: the engine remembers its longest step for up to a minute
    with witnesses(server.port, {}, seconds=arguments.undisturbed) as seen:
        pass
    quiet, texts = seen
    _report_quiet(quiet, figures)
    with witnesses(server.port, texts) as seen:
        good = Attack(GoodRequests(arguments.seed), server.port, at_once=arguments.at_once, raw_share=0, cancel_share=0)
        with priority(ATTACKER_NICENESS):
            asyncio.run(good.run(seconds=arguments.minutes * 60))
    beside_good, _ = seen
    engine = server.engine_pid()
    usages: list[tuple[float, dict[str, Usage | None]]] = [(0.0, server.usage())]
    mounted = Attack(
        generator,
        server.port,
        server.admin_port,
        at_once=arguments.at_once,
        raw_share=arguments.raw,
        next_index=arguments.first,
    )
    loop = LoopWatch(server)
    with witnesses(server.port, texts) as seen, priority(ATTACKER_NICENESS):
        asyncio.run(_attack(mounted, server, arguments.minutes * 60, usages, loop))
    under, _ = seen
    held = server.wait_for_rest()
    time.sleep(2)
    usages.append((time.monotonic(), server.usage()))
    report_attack(mounted, figures)
    _report_unanswered(mounted, server, figures)
    restarts = server.metric("trencadis_engine_restarts_total") or 0
    figures.show("ended engines", int(restarts), holds=not restarts and server.engine_pid() == engine, wanted="0")
    report_witness(quiet, under, under.faults(), loop, figures)
    report_gaps(
        {"undisturbed": quiet, "beside good requests": beside_good, "beside the attack": under},
        full,
        embed_s,
        loop,
        figures,
    )
    report_worst(under, mounted)
    report_usage(usages, figures)
    figures.show("held at the end", held or "nothing", holds=not held)
    _report_log(server.troubles(), figures)


def soak(server: Server, arguments: argparse.Namespace, figures: Figures) -> None:
    """Attack for so many minutes with kills and stops of the engine beside it, and print the figures."""
    generator = BadRequests(arguments.seed, document_of(server), tuple(arguments.only))
    with witnesses(server.port, {}, seconds=arguments.undisturbed) as seen:
        pass
    quiet, texts = seen
    _report_quiet(quiet, figures)
    usages: list[tuple[float, dict[str, Usage | None]]] = [(time.monotonic(), server.usage())]
    mounted = Attack(generator, server.port, server.admin_port, at_once=arguments.at_once, raw_share=arguments.raw)
    loop = LoopWatch(server)
    beside = kills_beside(server, arguments.seed, arguments.kill_every)
    with witnesses(server.port, texts) as seen, beside as kills, priority(ATTACKER_NICENESS):
        loop.server_stops_s = kills.server_stops_s
        asyncio.run(_attack(mounted, server, arguments.minutes * 60, usages, loop))
    under, _ = seen
    held = server.wait_for_rest()
    time.sleep(2)
    usages.append((time.monotonic(), server.usage()))
    mounted.is_excused = kills.excuses
    report_attack(mounted, figures)
    _report_unanswered(mounted, server, figures)
    figures.show("kills and stops", sum(kills.events.values()))
    report_kills(kills, figures)
    restarts = server.metric("trencadis_engine_restarts_total") or 0
    figures.show("ended engines", int(restarts), holds=restarts == kills.num_ended, wanted=str(kills.num_ended))
    report_witness(quiet, under, under.faults(kills.covers), loop, figures)
    report_usage(usages, figures, names=("server",))
    report_lives([(moment_s, usage["engine"]) for moment_s, usage in usages], figures)
    figures.show("held at the end", held or "nothing", holds=not held)
    _report_log([line for line in server.troubles() if not kills.explains(line)], figures)


def _report_quiet(quiet: Witness, figures: Figures) -> None:
    wrong = quiet.faults()
    figures.show("undisturbed: wrong texts", len(wrong), holds=not wrong, wanted="0")
    figures.list(wrong)


def _report_log(troubles: list[str], figures: Figures) -> None:
    figures.show("tracebacks and errors in the log", len(troubles), holds=not troubles, wanted="0")
    figures.list(f"{count} × {line}" for line, count in Counter(line[9:220] for line in troubles).most_common())


async def _long_text(server: Server) -> float:
    """Return how long a text to embed takes that uses the token budget, alone, seconds: it is computed whole, between two steps."""
    text = [10 + place * 7 % 4000 for place in range(TOKEN_BUDGET - 16)]
    answers = [await post(server.port, "/v1/embeddings", {"model": "demo", "input": text}) for _ in range(3)]
    return min(answer.seconds for answer in answers)


async def _full_step(server: Server) -> tuple[float, int]:
    """Return how long a step takes that uses the token budget, alone: the engine's longest of some, seconds and tokens."""
    for index in range(3):
        # Several at once, for a step is measured from the one before.
        prompts = [
            [10 + (index * 4 + one + place * 7) % 4000 for place in range(TOKEN_BUDGET - 16)] for one in range(4)
        ]
        await post(server.port, "/v1/completions", {"model": "demo", "prompt": prompts, "max_tokens": 2})
    return server.longest_step()


async def _attack(
    mounted: Attack,
    server: Server,
    seconds: float,
    usages: list[tuple[float, dict[str, Usage | None]]],
    loop: LoopWatch,
) -> None:
    async def measure() -> None:
        while True:
            await asyncio.sleep(min(seconds / 8, 20))
            usages.append((time.monotonic(), await asyncio.to_thread(server.usage)))
            await asyncio.to_thread(loop.look)

    measuring = asyncio.ensure_future(measure())
    await mounted.run(seconds=seconds)
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)
    await asyncio.to_thread(loop.look)


class LoopWatch:
    """The server's own gauges of its event loop, looked at more often than they forget.

    A server that was stopped finds all that arrived meanwhile in one turn of its loop: that is no request's doing, and is shown apart.

    Attributes:
        most: The largest values of each gauge, seconds.
        most_after_stop: The same within a minute after the server itself was stopped.
        server_stops_s: When it was, monotonic.
        longest_step: Of the engine: seconds and tokens.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.most: dict[str, float] = {}
        self.most_after_stop: dict[str, float] = {}
        self.server_stops_s: list[float] = []
        self.longest_step: tuple[float, int] = (0.0, 0)

    def look(self) -> None:
        """Take the present values in."""
        for name in ("trencadis_event_loop_lag_seconds", "trencadis_event_loop_held_seconds"):
            value = self._server.metric(name)
            now_s = time.monotonic()
            was_stopped = any(now_s - at_s < GAUGES_REMEMBER_S for at_s in self.server_stops_s)
            most = self.most_after_stop if was_stopped else self.most
            if value is not None:
                most[name] = max(most.get(name, 0.0), value)
        self.longest_step = max(self.longest_step, self._server.longest_step())


def report_attack(mounted: Attack, figures: Figures) -> None:
    """Print how the bad requests ended."""
    total = len(mounted.attempts)
    figures.show("bad requests", f"{total}, indices up to {mounted.next_index - 1}")
    figures.list(f"{count:6d} {outcome}" for outcome, count in mounted.outcomes.most_common())
    figures.show("raw HTTP cases", sum(mounted.raw_outcomes.values()))
    figures.list(f"{count:6d} {outcome}" for outcome, count in mounted.raw_outcomes.most_common())
    faults = mounted.faults()
    figures.show("answers that are the server's fault", len(faults), holds=not faults, wanted="0")
    unavailable = [one for one in faults if one.answer.status == 503]
    figures.list(
        [_told(one) for one in faults if one.answer.status != 503] + [_told(one) for one in unavailable[:3]], 60
    )
    if unavailable:
        print(
            f"    {len(unavailable)} of these are 503; the first engine ended during: {'; '.join(_before(unavailable[0], mounted))}"
        )
    odd = [one for one in mounted.attempts if 400 <= one.answer.status < 500 and _is_unclear(one)]
    figures.show("refusals that name no cause or the inside", len(odd), holds=not odd, wanted="0")
    figures.list(map(_told, odd), 20)


def _before(first: Attempt, mounted: Attack) -> list[str]:
    """Return the names of the attempts that were on when something went wrong first."""
    return [name[:90] for name in mounted.during(first.end_s, before_s=1.0)]


def _is_unclear(attempt: Attempt) -> bool:
    message = str(attempt.answer.error.get("message", "-"))
    inside = ("Traceback", "Error:", "TorchBackend", "<class", "object at 0x", "site-packages")
    return not message or any(word in message for word in inside)


def _told(attempt: Attempt) -> str:
    answer = attempt.answer
    message = str(answer.error.get("message", answer.body[:100]))
    return f"{attempt.name[:110]} ▶ {answer.outcome} after {answer.seconds:.1f} s: {message[:200]}"


def _report_unanswered(mounted: Attack, server: Server, figures: Figures) -> None:
    """Play once more, alone, what the attackers gave up: what is slow in a crowd is not hung."""
    given_up = mounted.unanswered()
    again = Attack(mounted.generator, server.port, server.admin_port, raw_share=mounted.raw_share, cancel_share=0)
    hung = []
    for one in given_up[:30]:
        index = int(one.name.partition(":")[2].split()[0])
        second = asyncio.run(again.attempt(index, patience_s=60))
        if second is not None and second.answer.outcome in {"left", "raw open"}:
            hung.append(second)
    figures.show("given up in the crowd", len(given_up))
    figures.list((_told(one) for one in given_up), 6)
    figures.show("without an answer when alone", len(hung), holds=not hung, wanted="0")
    figures.list(map(_told, hung))


def report_witness(quiet: Witness, under: Witness, wrong: list[str], loop: LoopWatch, figures: Figures) -> None:
    """Print what the well-behaved clients saw."""
    figures.show("texts beside the attack", f"{under.num_texts}, of which {len(under.told)} were told to try again")
    figures.show("of these not as undisturbed", len(wrong), holds=not wrong, wanted="0")
    figures.list(wrong)
    for name, value in loop.most.items():
        holds = value <= MOST_LOOP_GAP_S if "held" in name else None
        figures.show(name, f"{value * 1000:.0f} ms", holds=holds, wanted="" if holds is None else "50 ms")
    for name, value in loop.most_after_stop.items():
        figures.show(f"{name.removeprefix('trencadis_')} after a stop", f"{value * 1000:.0f} ms")
    pings, calm = max(under.pings_s, default=0), max(quiet.pings_s, default=0)
    figures.show(
        "largest time of the probe",
        f"{pings * 1000:.0f} ms, {calm * 1000:.0f} ms undisturbed",
        holds=None if loop.most else pings <= MOST_LOOP_GAP_S,
    )


def report_gaps(
    seen: dict[str, Witness], full: tuple[float, int], embed_s: float, loop: LoopWatch, figures: Figures
) -> None:
    """Print the gaps of well-behaved streams, and how long the engine's own steps took.

    What is wanted: a gap is at most three times the median beside the same number of clients with good requests, or the time that a
    step with the operator's token budget takes alone, whichever is longer: any client may have such a step computed.
    """
    print("gaps of streams, without what the witness itself was late; attackers have the lowest priority:")
    for name, saw in seen.items():
        gap, median = f"{saw.largest_s('stream') * 1000:.0f} ms", f"{saw.median_gap_s() * 1000:.1f} ms"
        raw, lag = max(saw.gaps_s, default=0) * 1000, saw.own_lag_s() * 1000
        print(
            f"    {name + ':':<24}{gap} at most, median {median} ({raw:.0f} ms with its lags, of {lag:.0f} ms at most)"
        )
    print(f"    a step of {full[1]} tokens, alone: {full[0] * 1000:.0f} ms")
    print(f"    a text of as many to embed, alone, for which every stream waits: {embed_s * 1000:.0f} ms")
    *_, good, under = seen.values()
    most_s = max(MOST_STEP_RATIO * good.median_gap_s(), full[0], embed_s)
    wanted = f"{most_s * 1000:.0f} ms: 3 × the median beside good requests, or the longest of the two alone"
    gap_s = under.largest_s("stream")
    figures.show("largest gap of a stream", f"{gap_s * 1000:.0f} ms", holds=gap_s <= most_s, wanted=wanted)
    seconds, tokens = loop.longest_step
    figures.show(
        "longest step of the engine",
        f"{seconds * 1000:.0f} ms, {tokens} tokens",
        holds=seconds <= most_s,
        wanted=wanted,
    )


def report_worst(under: Witness, mounted: Attack) -> None:
    """Print what was on during the largest gaps."""
    for kind in ("probe", "stream"):
        for seconds, moment_s, found in _apart([one for one in under.worst if one[2] == kind])[:6]:
            names = mounted.during(moment_s, before_s=seconds)
            print(f"    {found} {seconds * 1000:.0f} ms during: {'; '.join(name[:70] for name in names[:12])}")


def _apart(worst: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return the gaps that do not lie in a larger one: one cause is told once. Pure."""
    kept: list[tuple[float, float, str]] = []
    for one in worst:
        if all(one[1] < other[1] - other[0] or one[1] - one[0] > other[1] for other in kept):
            kept.append(one)
    return kept


def report_usage(
    usages: list[tuple[float, dict[str, Usage | None]]],
    figures: Figures,
    *,
    names: tuple[str, ...] = ("server", "engine"),
) -> None:
    """Print memory, descriptors and threads at the start, in the middle and at the end; growth is without the KV cache."""
    for name in names:
        found = [usage[name] for _, usage in usages]
        for label, index in (("start", 0), ("middle", len(found) // 2), ("end", -1)):
            figures.show(f"{name} at the {label}", found[index])
        start, middle, end = found[0], found[len(found) // 2], found[-1]
        if start is None or middle is None or end is None:
            figures.show(f"growth of the {name}", "unknown", holds=False)
            continue
        grown = end.own_mib - middle.own_mib
        is_flat = (
            grown <= MOST_GROWTH_MIB
            and end.num_descriptors <= max(start.num_descriptors + 4, middle.num_descriptors)
            and end.num_threads <= max(start.num_threads + MOST_WORKERS, middle.num_threads)
        )
        figures.show(
            f"growth of the {name} from the middle",
            f"{grown:.0f} MiB",
            holds=is_flat,
            wanted=f"{MOST_GROWTH_MIB:.0f} MiB",
        )


def report_lives(usages: list[tuple[float, Usage | None]], figures: Figures) -> None:
    """Print the growth from engine to engine, and within each that lived long; memory is without the KV cache.

    Engines are compared by what they held when they were seen last: those of the second half of the series with those of the first.

    Args:
        usages: Moments of the run, seconds, and what the engine held then; None: there was none.
        figures: Where they are shown.
    """
    lives: dict[int, list[tuple[float, Usage]]] = {}
    for moment_s, usage in usages:
        if usage is not None:
            lives.setdefault(usage.pid, []).append((moment_s, usage))
    _report_long_lives(list(lives.values()), usages[-1][0] - usages[0][0], figures)
    last = [life[-1][1] for life in lives.values()]
    half = max(len(last) // 2, 1)
    early, late = last[:half], last[half:] or last
    for label, found in (("first", early), ("second", late)):
        own_mib, kv_mib, descriptors, threads = (
            max(getattr(one, name) for one in found) for name in ("own_mib", "kv_mib", "num_descriptors", "num_threads")
        )
        most = Usage(rss_mib=own_mib + kv_mib, kv_mib=kv_mib, num_descriptors=descriptors, num_threads=threads)
        figures.show(f"{len(found)} engines of the {label} half", f"at most {most}")
    grown = max(one.own_mib for one in late) - max(one.own_mib for one in early)
    is_flat = grown <= MOST_GROWTH_MIB and max(one.num_descriptors for one in late) <= 4 + max(
        one.num_descriptors for one in early
    )
    wanted = f"{MOST_GROWTH_MIB:.0f} MiB, and 4 descriptors"
    figures.show("growth from engine to engine", f"{grown:.0f} MiB", holds=is_flat, wanted=wanted)


def _report_long_lives(lives: list[list[tuple[float, Usage]]], run_s: float, figures: Figures) -> None:
    """Print how much engines grew that lived for a third of the run: each from the second time it was seen, when it had served."""
    long = [life for life in lives if len(life) > 2 and life[-1][0] - life[0][0] >= run_s * LONG_LIFE_SHARE]
    figures.show("engines that lived for a third of the run", f"{len(long)} of {len(lives)}")
    if not long:
        return
    grown = max(life[-1][1].own_mib - life[1][1].own_mib for life in long)
    opened = max(life[-1][1].num_descriptors - life[1][1].num_descriptors for life in long)
    is_flat = grown <= MOST_GROWTH_MIB and opened <= 4
    wanted = f"{MOST_GROWTH_MIB:.0f} MiB, and 4 descriptors"
    figures.show(
        "largest growth of one of these", f"{grown:.0f} MiB, {opened} descriptors", holds=is_flat, wanted=wanted
    )


def kill(server: Server, arguments: argparse.Namespace, figures: Figures) -> None:
    """Kill and stop so many times and print the figures."""
    before = server.usage()
    done: Kills = run_kills(server, arguments.kills, arguments.seed)
    held = server.wait_for_rest()
    total = sum(done.events.values())
    figures.show("kills and stops", total, holds=total == arguments.kills, wanted=str(arguments.kills))
    report_kills(done, figures)
    figures.show("held at the end", held or "nothing", holds=not held)
    report_usage([(0.0, usage) for usage in (before, *done.usages, server.usage())], figures)


def report_kills(done: Kills, figures: Figures) -> None:
    """Print when everything was back after kills and stops, and how the requests beside them ended."""
    for kind, backs_s in done.backs_s.items():
        print(
            f"    {len(backs_s):4d} {kind}: back after {max(backs_s):.1f} s at most, {sorted(backs_s)[len(backs_s) // 2]:.1f} s in the middle"
        )
    longest = max((one for backs_s in done.backs_s.values() for one in backs_s), default=0.0)
    figures.show(
        "longest until everything was back",
        f"{longest:.1f} s",
        holds=longest <= MOST_BACK_S,
        wanted=f"{MOST_BACK_S:g} s",
    )
    silence = f"{done.silence_s:.1f} s"
    figures.show(
        "longest time a client heard nothing",
        silence,
        holds=done.silence_s <= MOST_SILENCE_S,
        wanted=f"{MOST_SILENCE_S:g} s",
    )
    figures.show("requests beside it", sum(done.answers.values()))
    figures.list(f"{count:6d} {outcome}" for outcome, count in done.answers.most_common())
    silent = ("cut off", "no connection", "never answered", "without Retry-After")
    cut = sum(count for outcome, count in done.answers.items() if outcome.endswith(silent))
    figures.show("clients that were told nothing", cut, holds=not cut, wanted="0")
    figures.show("wrong texts", len(done.wrong), holds=not done.wrong, wanted="0")
    figures.list([*done.wrong, *done.slow])


async def show_case(server: Server, arguments: argparse.Namespace) -> None:
    """Send one case alone and print it with its answer."""
    case = BadRequests(arguments.seed, document_of(server), tuple(arguments.only)).case(arguments.case)
    print(case.name, case.method, case.path[:200], dict(case.headers))
    print(case.body[:600], len(case.body), "bytes")
    answer = await send(server.admin_port if case.is_admin else server.port, case)
    print(f"{answer.outcome} after {answer.seconds:.2f} s: {answer.body[:2000]!r}")
    print("".join(server.lines[-30:]))


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to attack")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--at-once", type=int, default=8, help="attackers")
    parser.add_argument("--raw", type=float, default=0.12, help="share of raw HTTP cases")
    parser.add_argument("--only", nargs="*", default=[], choices=list(KINDS), help="kinds of bad requests")
    parser.add_argument("--undisturbed", type=float, default=12.0, help="seconds without an attack before it")
    parser.add_argument("--case", type=int, help="send this case alone and show the answer")
    parser.add_argument("--kills", type=int, default=0, help="so many kills and stops instead of bad requests")
    parser.add_argument(
        "--kill-every", type=float, default=0.0, help="seconds between kills and stops beside the attack"
    )
    parser.add_argument("--without-times", action="store_true", help="show times and do not judge them")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of trencadis serve, last")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run as the arguments say."""
    arguments = parsed(argv)
    figures = Figures(judges_times=not arguments.without_times)
    print(f"seed {arguments.seed}, {time.strftime('%F %T')}", flush=True)
    server = Server(*FLAGS, *(KILL_FLAGS if arguments.kills or arguments.kill_every else ()), *arguments.flags).wait()
    try:
        if arguments.case is not None:
            asyncio.run(show_case(server, arguments))
        elif arguments.kills:
            kill(server, arguments, figures)
        elif arguments.kill_every:
            soak(server, arguments, figures)
        else:
            attack(server, arguments, figures)
    finally:
        left = server.close()
        figures.show("left behind", left or "nothing", holds=not left)
        figures.list(left)
        if arguments.log:
            arguments.log.write_text("".join(server.lines))
    print(f"missed: {', '.join(figures.missed)}" if figures.missed else "every figure is as wanted")
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
