"""Families of models on the emulated device; the table in docs/gaudi.md lists them."""

from __future__ import annotations

import pytest

from support.backends import families, gaudi_engines
from trencadis.errors import ModelLoadError

SERVED = [kind for kind in (*families.SERVED, *families.PUBLISHED) if kind not in families.REFUSED_ON_GAUDI]
FEW_SIZES = {"strategy_options": {"limit": 1}, "check_model": True}


def texts(path, **options):
    engine = gaudi_engines.open_engine(path, **options)
    finished = gaudi_engines.serve(engine, 3, num_requests=2, greedy=True)
    assert not {one.error for one in finished.values()} - {""}
    engine.close()
    return {name: one.token_ids.tolist() for name, one in finished.items()}


@pytest.mark.representatives(1, ci=6)
@pytest.mark.parametrize("kind", SERVED)
def test_family_generates_what_the_backend_torch_does(tmp_path, kind):
    """In lazy mode, captured as requests come."""
    path = families.save_family(kind, tmp_path)
    assert texts(path, **FEW_SIZES, warmup=False) == texts(path, backend="torch")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVED[::22])
@pytest.mark.parametrize("mode", ["lazy", "compile", "eager"])
def test_family_compiles_nothing_after_the_warm_up_in_any_mode(tmp_path, kind, mode):
    """A few of them: the modes differ in how a forward is captured, families in what it computes."""
    path = families.save_family(kind, tmp_path)
    found = texts(path, **FEW_SIZES, mode=mode, emulated_frozen=mode != "eager")
    assert found == texts(path, backend="torch")


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.REFUSED_ON_GAUDI)
def test_family_that_a_gaudi_cannot_run_is_refused_in_words(tmp_path, kind):
    with pytest.raises(ModelLoadError, match=families.REFUSED_ON_GAUDI[kind]):
        gaudi_engines.open_engine(families.save_family(kind, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.REFUSED)
def test_family_that_the_backend_torch_refuses_is_refused(tmp_path, kind):
    """For the same reason."""
    path, said = families.save_family(kind, tmp_path), []
    for backend in ("torch", "gaudi"):
        with pytest.raises(ModelLoadError) as caught:
            gaudi_engines.open_engine(path, backend=backend, check_model=True)
        said.append(str(caught.value).replace(" and packed layers", "")[:60])
    assert said[0] == said[1]
