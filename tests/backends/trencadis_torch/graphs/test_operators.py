"""Operators against the library that they call; a wrong shape or an undeclared write would spoil a graph without a word."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from support.backends.held_forms import FORMS
from trencadis_torch.attention.native import compiled_kernel
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.graphs import operators as graph_ops
from trencadis_torch.linear.native import ACTIVATIONS, native
from trencadis_torch.linear.packed import pack

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")
CHECKS = ("test_schema", "test_faketensor")
"""Nothing here has gradients."""

N, K = 70, 24


@pytest.fixture(scope="module")
def ops():
    graph_ops.define()
    return torch.ops.trencadis


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [None, normal(N)])
@pytest.mark.parametrize("form", ["float32", "int8", "int4-minimums-16"])
def test_linear_layers(ops, form, bias):
    x, packed = normal(1, 3, K), pack([FORMS[form](normal(N, K))], [bias], native()).packed
    opcheck(ops.linear.default, (x, *packed), test_utils=CHECKS)
    assert torch.equal(ops.linear(x, *packed), native().linear(x, packed))
    ids = torch.tensor([[0, 69, 5]])
    opcheck(ops.rows.default, (ids, *packed, 2.0), test_utils=CHECKS)
    assert torch.equal(ops.rows(ids, *packed, 2.0), native().rows(ids, packed, 2.0))


def test_norms_and_gates(ops):
    x, weight = normal(1, 3, K), normal(K)
    opcheck(ops.rms_norm.default, (x, weight, 1e-5), test_utils=CHECKS)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), native().rms_norm(x, weight, 1e-5))
    opcheck(ops.gate.default, (x, ACTIVATIONS["silu"]), test_utils=CHECKS)
    assert torch.equal(ops.gate(x, ACTIVATIONS["silu"]), native().gate(x, ACTIVATIONS["silu"]))


@pytest.mark.parametrize("norms", [(None, None), (normal(8), normal(8) + 1)])
def test_rotation_in_place(ops, norms):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "eps": 1e-6}
    angles = {"cosines": normal(1, 3, 8).cos(), "sines": normal(1, 3, 8).sin()}
    named = {"query_norm": norms[0], "key_norm": norms[1]}
    found, expected = normal(1, 3, 32), normal(1, 3, 32)
    opcheck(ops.rotate.default, (found.clone(),), {**sizes, **angles, **named}, test_utils=CHECKS)
    ops.rotate(found, **sizes, **angles, **named)
    native().rotate(expected, norms=norms, **sizes, **angles)
    assert torch.equal(found, expected)
    assert not torch.equal(found, normal(1, 3, 32))


def test_attention_declares_that_it_writes_to_the_cache(ops):
    layer = AttentionLayer(index=0, num_kv_heads=1, key_dim=8, value_dim=4, window=0, dtype=torch.float32)
    cache = PagedKVCache((layer,), num_blocks=3, block_size=2, device=torch.device("cpu"), kernel=compiled_kernel())
    keys, values = cache.layer(0)
    arguments = (
        normal(3, 2, 8),
        normal(3, 1, 8),
        normal(3, 1, 4),
        keys,
        values,
        torch.tensor([[2, 1]], dtype=torch.int32),
        torch.tensor([4, 5, 2]),
        torch.tensor([[0], [0], [3], [0]], dtype=torch.int32),
        0,
    )
    options = AttentionOptions()
    packed = options.packed(8)
    opcheck(ops.attend.default, (*arguments, *packed), test_utils=CHECKS)
    found = ops.attend(*arguments, *packed)
    assert torch.equal(keys.flatten(0, 1)[[4, 5, 2]], arguments[1])
    assert torch.equal(graph_ops.kernel_attention(*arguments, options=options), found)


def test_a_graph_calls_operators_and_eager_code_the_library():
    seen = []
    native_ops = graph_ops.graph_native()
    packed, weight = native_ops.pack_floats(normal(2 * K, K)), normal(K)

    def layer(x, ids):
        x = native_ops.rms_norm(x + native_ops.rows(ids, packed, 1.0), weight, 1e-5)
        return native_ops.gate(native_ops.linear(x, packed), 0)

    def note(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x, ids = normal(1, 3, K), torch.tensor([[1, 2, 3]])
    graph_ops.define()
    with torch.inference_mode():
        assert torch.equal(torch.compile(layer, backend=note, fullgraph=True)(x, ids), layer(x, ids))
    assert [name for name in seen if "trencadis" in name] == [
        f"trencadis.{name}" for name in ("rows", "rms_norm", "linear", "gate")
    ]
