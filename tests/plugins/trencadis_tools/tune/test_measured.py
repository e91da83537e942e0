from __future__ import annotations

import pytest

from support.simulation import asked
from trencadis.errors import ConfigError
from trencadis_tools.compare.candidates import restored
from trencadis_tools.simulation import StepShape
from trencadis_tools.tune import measured
from trencadis_tools.tune.measured import measure_steps
from trencadis_tools.workloads import Workload

WORKLOAD = Workload(name="short", requests=tuple(asked(str(i), float(i), 8 + i, 4) for i in range(40)))


def test_the_configured_engine_gives_step_times_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_NUM_STEPS", 120)
    found = measure_steps(restored("start", {"cache.num_blocks": 300, "model.max_model_len": 100}), WORKLOAD)
    assert (found.num_blocks, found.max_model_len) == (300, 100)
    assert found.times.device_s(StepShape(num_decodes=1, num_decode_tokens=1, num_decode_context=20)) > 0
    assert "steps of the configured engine on this machine" in found.words
    assert found.facts["format"] == "trencadis step times 1"


def test_a_model_that_only_embeds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "build_engine", lambda config, registry: Embeds())
    with pytest.raises(ConfigError, match="the model only embeds"):
        measure_steps(restored("start", {}), WORKLOAD)


class Embeds:
    def close(self) -> None:
        """There is nothing to close."""
