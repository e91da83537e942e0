from __future__ import annotations

import pytest

from trencadis.interfaces import Component


def _component(**changes):
    return Component(
        **{"name": "x", "factory": lambda config, context: None, "summary": "Of a test.", "interface_version": 1}
        | changes
    )


@pytest.mark.parametrize("field", ["requires", "provides"])
def test_capabilities_are_a_set_of_names(field):
    assert getattr(_component(**{field: ["backend.padded"]}), field) == frozenset({"backend.padded"})


@pytest.mark.parametrize("field", ["requires", "provides"])
def test_one_text_is_no_set_of_capabilities(field):
    with pytest.raises(TypeError) as caught:
        _component(**{field: "backend.padded"})
    assert str(caught.value) == (
        "requires and provides are sets of capabilities: write {'backend.padded'}, not 'backend.padded'"
    )
