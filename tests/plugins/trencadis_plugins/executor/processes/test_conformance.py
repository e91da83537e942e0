from __future__ import annotations

from support.strategies.failing_ranks import WithoutSums
from trencadis.records import ParallelLayout
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_testing import ExecutorConformance


class TestOneFreshProcess(ExecutorConformance):
    def make(self):
        return ProcessesExecutor(ProcessesConfig(), layout=ParallelLayout())


class TestTwoForkedProcesses(ExecutorConformance):
    def make(self):
        return WithoutSums(ProcessesConfig(), layout=ParallelLayout(tensor=2))
