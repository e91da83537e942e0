"""Ranks are forked from a process that has imported what they need; whoever of the three is killed or stopped, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.eventually import eventually
from support.strategies.failing_ranks import WithoutSums, fail, leave_a_thread
from trencadis.errors import RanksLostError
from trencadis.records import ModelSource, ParallelLayout
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_testing.executor_fakes import make_backend, make_sampler, one_token, plan_of

SOURCE = ModelSource(path="fake")


def start(executor):
    executor.start(make_backend=make_backend, make_sampler=make_sampler, source=SOURCE)
    executor.allocate(plan_of())
    return executor


def executor(**options):
    return WithoutSums(ProcessesConfig(), layout=ParallelLayout(tensor=2), **options)


@pytest.fixture
def started():
    made = start(executor())
    yield made
    made.close()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_are_children_of_one_process_which_ends_with_the_executor(started):
    template = started._template.pid
    assert [parent_of(pid) for pid in started.process_ids] == [template, template]
    assert [os.getsid(pid) for pid in started.process_ids] == started.process_ids
    started.close()
    assert not any(map(runs, (template, *started.process_ids)))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_ranks_go_on_without_the_process_they_were_forked_from_and_the_next_come_from_another(started, sent):
    template, first = started._template.pid, list(started.process_ids)
    os.kill(template, sent)
    # Another one is started while ranks go on, as soon as somebody waits for them.
    eventually(lambda: started.metrics() is not None and started._template.pid != template)
    assert started.submit(one_token(1)).wait().num_emitted.tolist() == [0]
    os.kill(first[0], signal.SIGKILL)
    with pytest.raises(RanksLostError, match="rank 0 "):
        started.submit(one_token(1)).wait()
    started.restart()
    assert started.submit(one_token(1)).wait().num_emitted.tolist() == [0]
    assert not any(map(runs, (template, *first)))
    assert parent_of(started.process_ids[-1]) == started._template.pid != template


@pytest.mark.parametrize("stopped", ["rank", "template", "rank and template", "nobody"])
def test_nothing_is_left_of_an_executor_that_was_killed(stopped):
    code = (
        "import os, signal\n"
        "from trencadis_testing.executor_fakes import make_backend, make_sampler\n"
        "from trencadis.records import ModelSource, ParallelLayout\n"
        "from trencadis_plugins.executor.config import ProcessesConfig\n"
        "from support.strategies.failing_ranks import WithoutSums\n"
        "made = WithoutSums(ProcessesConfig(), layout=ParallelLayout(tensor=2))\n"
        "made.start(make_backend=make_backend, make_sampler=make_sampler, source=ModelSource(path='fake'))\n"
        "print(made._template.pid, *made.process_ids, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as engine:
        pids = [int(word) for word in engine.stdout.readline().split()]
        assert len(pids) == 3
        for name, pid in (("template", pids[0]), ("rank", pids[2])):
            if name in stopped:
                os.kill(pid, signal.SIGSTOP)
        engine.kill()
    eventually(lambda: not any(map(runs, pids)))


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("preload", "said"), [(fail, "no such library"), (leave_a_thread, "left threads")])
def test_where_that_process_cannot_be_had_ranks_start_without_it(capfd, caplog, preload, said):
    made = start(executor(preload=preload))
    assert made.submit(one_token(1)).wait().num_emitted.tolist() == [0]
    assert [parent_of(pid) for pid in made.process_ids] == [os.getpid()] * 2
    made.close()
    assert "ended with exit code 1; ranks start without it" in caplog.text
    assert said in capfd.readouterr().err


def test_a_process_that_is_killed_while_it_imports_is_started_again(started, monkeypatch):
    killed = []

    class Killed(type(started._template)):
        def __init__(self, preload):
            super().__init__(preload)
            if not killed:
                killed.append(self.pid)
                self._process.kill()

    monkeypatch.setattr("trencadis_plugins.executor.processes.RankTemplate", Killed)
    other = start(executor())
    assert killed != [other._template.pid]
    assert parent_of(other.process_ids[0]) == other._template.pid
    other.close()


def test_a_maker_without_anything_to_import_has_its_ranks_started_afresh():
    made = start(executor(preload=None))
    assert made._template is None
    assert [parent_of(pid) for pid in made.process_ids] == [os.getpid()] * 2
    made.close()
