"""What a server's options say about peers: files that are checked at the start, and TLS from end to end."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.connector.config import ConnectorConfig
from headwater.connector.peering import peer_options
from headwater.engine.config import EngineConfig
from headwater.errors import ConfigError, EngineConfigError, InvalidArgumentError
from headwater.kv.topology import whole_shard
from headwater.peers.options import PeerOptions
from headwater.peers.process import ReceiverChild, ReceiverSpec
from headwater.peers.sender import PeerSender
from headwater.pool.pool import open_pool
from peer_cases import CHUNK, check_arrived, open_space, prompt, save, transfer_id

from support import WAIT_S, temporary_url

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


@pytest.fixture
def files(tmp_path: Path) -> PeerOptions:
    """A certificate for 127.0.0.1 that signs itself, and a secret."""
    cert, key, secret = (tmp_path / name for name in ("cert.pem", "key.pem", "secret"))
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", cert, *named], check=True, capture_output=True)
    secret.write_text("a secret that both hosts have\n")
    return PeerOptions(str(secret), str(cert), str(key), str(cert))


def push(tmp_path: Path, receiver: str, there_url: str, options: PeerOptions) -> int:
    """Tokens that arrived of a push with these options; their bytes are right."""
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url, open_pool(url) as one, open_pool(there_url) as other:
        here = open_space(one)
        chunks = prompt(here, 3)
        save(here, chunks, whole_shard(here.spec))
        settings = replace(options.link_settings(), io_s=2.0)
        sender = PeerSender(here, whole_shard(here.spec), settings=settings)
        try:
            transfer = transfer_id()
            sender.push(transfer, receiver, chunks)
            tokens = sender.flush(transfer, 10.0)
        finally:
            sender.close()
        if tokens:
            check_arrived(open_space(other), chunks)
        return tokens


@needs_openssl
def test_a_servers_receiver_takes_tls_from_its_peers_and_from_nobody_else(tmp_path: Path, files: PeerOptions) -> None:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url:
        child = ReceiverChild(ReceiverSpec(url, "127.0.0.1:0", files))
        child.start(WAIT_S)
        try:
            assert child._process is not None
            assert files.tls_key is not None
            assert files.tls_key.encode() not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
            for less in (
                PeerOptions(files.secret_file),  # no TLS
                replace(files, tls_cert=None, tls_key=None),  # no certificate of its own
                replace(files, tls_ca=None),  # does not trust the receiver
            ):
                assert push(tmp_path, child.address, url, less) == 0
            assert push(tmp_path, child.address, url, files) == 3 * CHUNK
        finally:
            child.close()


@needs_openssl
def test_a_receiver_without_a_ca_wants_no_certificate_of_its_callers(tmp_path: Path, files: PeerOptions) -> None:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url:
        child = ReceiverChild(ReceiverSpec(url, "127.0.0.1:0", replace(files, tls_ca=None)))
        child.start(WAIT_S)
        try:
            assert push(tmp_path, child.address, url, replace(files, tls_cert=None, tls_key=None)) == 3 * CHUNK
        finally:
            child.close()


@needs_openssl
def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, files: PeerOptions) -> None:
    files.check(receives=True)
    replace(files, tls_cert=None, tls_key=None).check(receives=False)
    with pytest.raises(InvalidArgumentError, match="certificate of its own"):
        replace(files, tls_cert=None, tls_key=None).check(receives=True)
    for receives in (True, False):
        with pytest.raises(InvalidArgumentError, match="certificate"):
            PeerOptions(tls_key=files.tls_key).check(receives=receives)
    for missing in (replace(files, tls_cert="/nowhere"), replace(files, tls_ca="/nowhere")):
        with pytest.raises(InvalidArgumentError, match="TLS files cannot be used"):
            missing.check(receives=False)
    with pytest.raises(ConfigError, match="secret"):
        replace(files, secret_file="/nowhere").check(receives=False)
    with pytest.raises(InvalidArgumentError, match="does not encrypt"):
        replace(files, carrier="nixl").check(receives=False)


def test_both_engines_configurations_say_the_same() -> None:
    given = {
        "peer_secret_file": "secret",
        "peer_tls_cert": "cert",
        "peer_tls_key": "key",
        "peer_tls_ca": "ca",
        "peer_carrier": "nixl",
    }
    engine = EngineConfig(model="m", pool="shm:///x", **given)  # type: ignore[arg-type]
    assert engine.connector is not None
    expected = PeerOptions("secret", "cert", "key", "ca", "nixl")
    assert peer_options(engine) == peer_options(engine.connector) == expected
    spec = ReceiverSpec("shm:///x", "127.0.0.1:0", expected)
    assert ReceiverSpec.of(spec.line().decode()) == spec
    with pytest.raises(EngineConfigError, match="peer_carrier"):
        ConnectorConfig(pool="shm:///x", peer_carrier="rdma")
