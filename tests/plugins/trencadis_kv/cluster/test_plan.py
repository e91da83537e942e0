from __future__ import annotations

import pytest

from trencadis.errors import ConfigError
from trencadis_kv.cluster.plan import Member, plan_cluster


def flag(member: Member, name: str) -> str:
    (value,) = [one.partition("=")[2] for one in member.flags if one.startswith(f"--{name}=")]
    return value


def test_those_who_serve_clients_know_those_who_compute_prompts() -> None:
    members = plan_cluster(num_prefill=2, num_decode=2, port=8000, flags=["--cache.num-blocks=64"])
    assert [(one.name, one.role) for one in members] == [
        ("prefill 0", "prefill"),
        ("prefill 1", "prefill"),
        ("decode 0", "decode"),
        ("decode 1", "decode"),
    ]
    addresses = ",".join(f"127.0.0.1:{flag(one, 'kv-connector.p2p.port')}" for one in members[:2])
    assert {flag(one, "kv-connector.p2p.prefill-engines") for one in members[2:]} == {addresses}
    assert {flag(one, "engine.role") for one in members[:2]} == {"prefill"}
    assert all(flag(one, "cache.num-blocks") == "64" for one in members)
    assert all(flag(one, "server.port") == str(one.port) for one in members)
    assert len({one.port for one in members} | {8000}) == 5
    assert [flag(one, "kv-connector.p2p.prefill-engines") for one in members[:2]] == ["", ""]


def test_members_know_a_secret_that_no_other_cluster_has_and_no_command_line_shows() -> None:
    first, second = (plan_cluster(num_prefill=1, num_decode=2, port=8000) for _ in range(2))
    (secret,) = {one.environment["TRENCADIS_KV_CONNECTOR__P2P__SECRET"] for one in first}
    assert len(secret) == 64
    assert secret not in str(first)
    assert secret not in {one.environment["TRENCADIS_KV_CONNECTOR__P2P__SECRET"] for one in second}


def test_nobody_can_be_reached_from_other_machines() -> None:
    members = plan_cluster(num_prefill=1, num_decode=2, port=8000)
    assert {flag(one, "server.host") for one in members} == {"127.0.0.1"}
    assert {flag(one, "kv-connector.p2p.host") for one in members} == {"127.0.0.1"}
    assert {flag(one, "kv-connector.p2p.advertised-host") for one in members} == {"127.0.0.1"}


def test_port_that_a_file_names_is_not_that_of_all_members() -> None:
    members = plan_cluster(num_prefill=2, num_decode=2, port=8000)
    ports = [flag(one, "kv-connector.p2p.port") for one in members]
    assert "0" not in ports[:2], "others have to know it"
    assert ports[0] != ports[1]
    assert ports[2:] == ["0", "0"]


def test_one_that_serves_clients_alone_does_so_where_they_come() -> None:
    *_, decode = plan_cluster(num_prefill=1, num_decode=1, port=8123)
    assert (decode.name, decode.port) == ("decode 0", 8123)


def test_without_prefill_engines_the_others_do_both() -> None:
    (one,) = plan_cluster(num_prefill=0, num_decode=1, port=8123)
    assert (one.role, flag(one, "engine.role")) == ("both", "both")
    assert flag(one, "kv-connector.p2p.prefill-engines") == "", "also where a file names some"


@pytest.mark.parametrize(
    "given", ["--server.port=1", "--kv-connector.p2p.prefill-engines=a:1", "--kv_connector.name=redis", "--engine.role"]
)
def test_what_the_cluster_sets_itself_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="the cluster sets"):
        plan_cluster(num_prefill=1, num_decode=1, port=8000, flags=[given])
