"""Through TLS everything is as without it, and a server that nobody vouches for gets nothing."""

from __future__ import annotations

import datetime
import ipaddress
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.kv.redis_server import RedisServer, running_redis
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import redis_stores

x509 = pytest.importorskip("cryptography.x509")

KEYS = [f"kv1/default/{number:064x}" for number in range(40)]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1, signed by itself, and its key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture(scope="module")
def server(certificates: Path) -> Iterator[RedisServer]:
    with running_redis(tls=certificates) as server:
        yield server


def test_what_was_put_is_got_through_tls(
    server: RedisServer, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RedisConfig(url=server.url, tls_ca_path=str(certificates / "cert.pem"))
    store = redis_stores(config)()
    values = [bytes([number]) * 100_000 for number in range(40)]
    with caplog.at_level(logging.INFO, "trencadis.kv.redis"):
        assert store.put(KEYS, [[memoryview(value[:128]), memoryview(value[128:])] for value in values]) == 40
    assert "policy allkeys-lfu" in caplog.text, "redis-py found no way in"
    targets = [memoryview(bytearray(100_000)) for _ in KEYS]
    assert list(store.get(KEYS, targets)) == [100_000] * 40
    assert [bytes(target) for target in targets] == values
    assert store.contains([*KEYS, "kv1/none"]) == 40
    store.close()


def test_server_that_nobody_vouches_for_is_refused_in_words(server: RedisServer) -> None:
    with pytest.raises(TransferError, match=r"kv_connector\.redis\.tls_ca_path") as caught:
        redis_stores(RedisConfig(url=server.url))().contains(KEYS)
    assert caught.value.cause == TransferCause.UNREACHABLE


def test_plain_text_to_a_port_of_tls_is_an_error(server: RedisServer) -> None:
    with pytest.raises(TransferError):
        redis_stores(RedisConfig(url=f"redis://127.0.0.1:{server.port}", io_timeout_s=1.0))().contains(KEYS)
