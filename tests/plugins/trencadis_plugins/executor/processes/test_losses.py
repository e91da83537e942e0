"""A rank that ends, stops or goes on alone ends all of them; the engine starts them again, and texts are what they would have been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.strategies.failing_ranks import (
    DEADLY,
    CannotSample,
    Dies,
    Hangs,
    MakesDyingAtLoad,
    OneSided,
    WaitsInVain,
    WithoutSums,
)
from trencadis.clock import SimulatedClock, SystemClock
from trencadis.errors import BackendError, RanksLostError, SamplingFailedError
from trencadis.records import FinishReason, ModelSource, ParallelLayout, Request, SamplingParams
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.executor_fakes import make_backend, make_sampler, one_token, plan_of
from trencadis_testing.fakes import fake_text

SOURCE = ModelSource(path="fake")


def executor(num_ranks: int = 2, **config) -> ProcessesExecutor:
    return WithoutSums(ProcessesConfig(**config), layout=ParallelLayout(tensor=num_ranks))


@pytest.fixture
def started():
    made = executor()
    made.start(make_backend=make_backend, make_sampler=make_sampler, source=SOURCE)
    made.allocate(plan_of())
    yield made
    made.close()


def pids(made: ProcessesExecutor) -> list[int]:
    return [rank.pid for rank in made._ranks]


def are_gone(processes: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_killed_is_named_and_all_are_started_again(started, rank):
    before = pids(started)
    os.kill(before[rank], signal.SIGKILL)
    with pytest.raises(RanksLostError, match=f"rank {rank} was killed by SIGKILL"):
        started.submit(one_token(1)).wait()
    assert are_gone(before)
    with pytest.raises(RanksLostError):
        started.submit(one_token(1)).wait()
    started.restart()
    assert started.submit(one_token(1)).wait().num_emitted.tolist() == [0]
    assert not set(before) & set(pids(started))


def test_a_rank_that_is_stopped_is_named(started):
    before = pids(started)
    os.kill(before[1], signal.SIGSTOP)
    with pytest.raises(RanksLostError, match="rank 1 was stopped"):
        started.submit(one_token(1)).wait()
    assert are_gone(before)


def test_copies_and_the_rest_of_a_warm_up_leave_it_to_the_next_batch_to_say_that_ranks_are_lost(started):
    os.kill(pids(started)[1], signal.SIGKILL)
    one = np.zeros(1, np.int32)
    started.copy_blocks(sources=one, targets=one)
    assert started.warm_up_rest(is_idle=True) == ()
    with pytest.raises(RanksLostError):
        started.submit(one_token(1)).wait()
    with pytest.raises(RanksLostError):
        started.embed([np.ones(1, np.int32)])
    assert started.metrics() == ""
    started.close_connector()


@pytest.mark.nightly
def test_ranks_that_are_lost_too_often_are_not_started_again():
    made = executor(1, max_restarts=1)
    made.start(make_backend=make_backend, make_sampler=make_sampler, source=SOURCE)
    for is_last in (False, True):
        os.kill(pids(made)[0], signal.SIGKILL)
        with pytest.raises(RanksLostError):
            made.submit(one_token(1)).wait()
        if is_last:
            with pytest.raises(BackendError, match=r"lost its ranks 2 times within 600 s.*SIGKILL"):
                made.restart()
        else:
            made.restart()
    made.close()


@pytest.mark.nightly
def test_ranks_that_are_lost_while_they_are_started_again_are_started_once_more(tmp_path):
    mark = tmp_path / "deadly"
    made = executor(1, max_restarts=2)
    made.start(make_backend=MakesDyingAtLoad(mark), make_sampler=make_sampler, source=SOURCE)
    made.allocate(plan_of())
    os.kill(pids(made)[0], signal.SIGKILL)
    with pytest.raises(RanksLostError):
        made.submit(one_token(1)).wait()
    mark.touch()
    made.restart()
    assert not mark.exists()
    assert made.submit(one_token(1)).wait().num_emitted.tolist() == [0]
    made.close()


@pytest.mark.nightly
def test_restarts_are_forgotten_after_their_window():
    clock = SimulatedClock()
    made = ProcessesExecutor(
        ProcessesConfig(max_restarts=1, restart_window_s=10.0), layout=ParallelLayout(), clock=clock
    )
    made.start(make_backend=make_backend, make_sampler=make_sampler, source=SOURCE)
    for _ in range(2):
        os.kill(pids(made)[0], signal.SIGKILL)
        with pytest.raises(RanksLostError):
            made.submit(one_token(1)).wait()
        made.restart()
        clock.advance(11.0)
    made.close()


@pytest.mark.parametrize(("backend", "rank"), [(OneSided, 1), (WaitsInVain, 0)])
def test_a_step_that_fails_on_one_rank_only_ends_all_for_their_caches_or_their_sums_differ(backend, rank):
    made = executor()
    made.start(make_backend=backend, make_sampler=make_sampler, source=SOURCE)
    made.allocate(plan_of())
    with pytest.raises(RanksLostError, match=rf"failed on rank {rank} and not on all.*rank {rank} alone"):
        made.submit(one_token(DEADLY)).wait()
    made.close()


def test_a_step_of_which_the_sampling_alone_failed_costs_no_rank():
    made = executor()
    made.start(make_backend=CannotSample, make_sampler=make_sampler, source=SOURCE)
    made.allocate(plan_of())
    before = pids(made)
    steps = [made.submit(one_token(token)) for token in (1, DEADLY, 1)]
    assert steps[0].wait().num_emitted.tolist() == [0]
    with pytest.raises(SamplingFailedError, match="no tokens"):
        steps[1].wait()
    assert steps[2].wait().num_emitted.tolist() == [0]
    assert pids(made) == before
    made.close()


def test_a_rank_that_is_silent_is_named_with_its_stack_in_the_log(capfd):
    made = executor(1, silence_s=0.5)
    made.start(make_backend=Hangs, make_sampler=make_sampler, source=SOURCE)
    made.allocate(plan_of())
    with pytest.raises(RanksLostError, match="rank 0 did not answer"):
        made.submit(one_token(DEADLY)).wait()
    made.close()
    assert "in submit" in capfd.readouterr().err


@pytest.mark.nightly
def test_ranks_end_with_the_process_of_their_executor():
    code = (
        "import os, signal, sys\n"
        "from trencadis_testing.executor_fakes import make_backend, make_sampler\n"
        "from trencadis.records import ModelSource, ParallelLayout\n"
        "from trencadis_plugins.executor.config import ProcessesConfig\n"
        "from support.strategies.failing_ranks import WithoutSums\n"
        "made = WithoutSums(ProcessesConfig(), layout=ParallelLayout(tensor=2))\n"
        "made.start(make_backend=make_backend, make_sampler=make_sampler, source=ModelSource(path='fake'))\n"
        "print(*[rank.pid for rank in made._ranks], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    ranks = [int(word) for word in ended.stdout.split()]
    assert len(ranks) == 2
    for pid in ranks:  # their parent cannot wait for them any more
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            os.sched_yield()


# ------------------------------------------------------------------------------------------------- whole engines


def serve_with_deaths(tmp_path, *, once, prompts):
    mark = tmp_path / "deadly"
    mark.touch()
    made = executor(2, max_restarts=5)
    engine = make_engine(
        executor=made,
        backend=Dies(mark, once=once),
        clock=SystemClock(),
        num_blocks=60,
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    for name, prompt in prompts.items():
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=12)))
    ended = drain(engine)
    engine.close()
    return ended


PROMPTS = {"a": (1, 2, 3), "deadly": (DEADLY, 5, 6), "c": tuple(range(20, 40)), "d": (7, 8)}


def test_after_a_chance_death_every_text_is_what_it_would_have_been(tmp_path):
    ended = serve_with_deaths(tmp_path, once=True, prompts=PROMPTS)
    assert {name: one.token_ids.tolist() for name, one in ended.items()} == {
        name: fake_text(prompt, 12, eos=-1) for name, prompt in PROMPTS.items()
    }


def test_a_request_that_ends_its_rank_each_time_ends_alone(tmp_path):
    ended = serve_with_deaths(tmp_path, once=False, prompts=PROMPTS)
    assert ended["deadly"].finish_reason is FinishReason.ERROR
    assert "was killed by SIGKILL" in ended["deadly"].error
    assert {name: one.token_ids.tolist() for name, one in ended.items() if name != "deadly"} == {
        name: fake_text(prompt, 12, eos=-1) for name, prompt in PROMPTS.items() if name != "deadly"
    }


class Watched(WithoutSums):
    """Notes since when nothing was heard of its ranks, as it calls them for the first time."""

    def _call(self, name, **arguments):
        if name == "make":
            self.heard_s = [rank.heard_s for rank in self._ranks]
        return super()._call(name, **arguments)


def test_a_rank_that_is_about_to_import_was_heard_of_when_it_connected():
    clock = SystemClock()
    begin_s = clock.now_s()
    made = Watched(ProcessesConfig(), layout=ParallelLayout(tensor=2), clock=clock)
    made.start(make_backend=make_backend, make_sampler=make_sampler, source=SOURCE)
    made.close()
    assert len(made.heard_s) == 2
    assert all(begin_s < heard_s < clock.now_s() for heard_s in made.heard_s)
