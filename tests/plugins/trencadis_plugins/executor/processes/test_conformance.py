from __future__ import annotations

from trencadis.records import ParallelLayout
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_testing import ExecutorConformance


class TestOneProcess(ExecutorConformance):
    def make(self):
        return ProcessesExecutor(ProcessesConfig(), layout=ParallelLayout())


class TestTwoProcesses(ExecutorConformance):
    """Fakes that compute the same: without sums there are no groups."""

    def make(self):
        return ProcessesExecutor(ProcessesConfig(), layout=ParallelLayout(tensor=2))
