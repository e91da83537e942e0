"""A gated pass asks before it attends, and changes nothing else; the suite of the backend has the rest."""

from __future__ import annotations

import torch

from trencadis_torch.attention.layerwise import GatedPass


class Recorder:
    """Both what is asked and who attends."""

    def __init__(self):
        self.calls = []

    def wait(self, layer):
        self.calls.append(("wait", layer))

    def attend(self, layer, query, keys, values, *, scale, softcap, sinks):
        self.calls.append(("attend", layer, scale, softcap, sinks))
        return query + keys + values


def test_layer_is_waited_for_before_it_attends_with_what_it_was_given():
    both = Recorder()
    one = torch.ones(2, 1, 4)
    output = GatedPass(both, both).attend(7, one, 2 * one, 3 * one, scale=0.5, softcap=None, sinks=None)
    assert both.calls == [("wait", 7), ("attend", 7, 0.5, None, None)]
    assert torch.equal(output, 6 * one)
