"""The embedded server, and connections to it and to external ones."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.protocol.service_settings import RedisSettings
from ernie5.services.child_process import start_child, stop_child
from ernie5.services.redis_client import connect
from ernie5.services.redis_server import find_binary, running_url, start_server
from ernie5.services.streams import TokenFeed, TokenStream
from tests.services.conftest import server_binary
from tests.services.stream_helpers import expected_payloads, payloads, sample_of, settle_all, wait_for


def test_a_server_is_started_used_and_stopped(tmp_path, binary):
    with start_server(tmp_path / "redis", binary=binary) as server:
        assert connect(server.url).ping()
        assert running_url(tmp_path / "redis") == server.url
        process = server.process
    assert process.returncode == 0
    assert running_url(tmp_path / "redis") is None
    with pytest.raises(UnavailableError):
        connect(server.url, retries=0)


def test_only_the_owner_may_read_the_password_and_only_this_machine_connect(tmp_path, binary):
    with start_server(tmp_path / "redis", binary=binary) as server:
        for name in ("url", "redis.conf"):
            assert (tmp_path / "redis" / name).stat().st_mode & 0o777 == 0o600
        command_line = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        password = server.url.split(":")[2].split("@")[0]
        assert len(password) >= 32 and password.encode() not in command_line
        with pytest.raises(UnavailableError, match="refused the login"):
            connect(server.url.replace(password, "wrong"), retries=0)
        with pytest.raises(UnavailableError, match="refused the login"):
            connect(f"redis://127.0.0.1:{server.port}", retries=0)
        bound = connect(server.url).config_get("bind")
        assert bound["bind"] == "127.0.0.1"


def test_a_second_start_finds_the_first(tmp_path, binary):
    with start_server(tmp_path / "redis", binary=binary) as first:
        second = start_server(tmp_path / "redis", binary=binary)
        assert second.url == first.url and not second.owned
        second.stop()
        assert connect(first.url).ping(), "whoever did not start it does not stop it"


def test_data_survive_a_stop_and_a_kill(tmp_path, binary):
    with start_server(tmp_path / "redis", binary=binary) as server:
        connect(server.url).set("key", "one")
    with start_server(tmp_path / "redis", binary=binary) as server:
        client = connect(server.url)
        assert client.get("key") == b"one"
        client.set("key", "two")
        wait_for(lambda: not client.info("persistence")["aof_pending_bio_fsync"])
        server.process.kill()
        server.process.wait()
        with start_server(tmp_path / "redis", binary=binary) as again:
            assert connect(again.url).get("key") == b"two"


def test_the_server_dies_with_its_parent(tmp_path, binary):
    program = (
        "import sys, time; from pathlib import Path; from ernie5.services.redis_server import start_server\n"
        "server = start_server(sys.argv[1], binary=Path(sys.argv[2]))\n"
        "Path(sys.argv[3]).write_text(str(server.process.pid)); time.sleep(600)"
    )
    note = tmp_path / "pid"
    parent = start_child([sys.executable, "-c", program, str(tmp_path / "redis"), str(binary), str(note)])
    wait_for(lambda: note.exists() and note.read_text(), "the server")
    pid = int(note.read_text())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "the end of the server")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_server_that_cannot_start_says_why(tmp_path, binary):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UnavailableError, match=r"did not come up.*in use"):
            start_server(tmp_path / "redis", binary=binary, port=taken.getsockname()[1])
    with pytest.raises(InvalidInputError, match="quote"):
        start_server(tmp_path / 'a"b', binary=binary)


def test_the_system_server_goes_first_and_the_bundled_one_stands_in(monkeypatch):
    assert find_binary() == server_binary("redis-server")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_binary() == server_binary("valkey")


def test_memory_is_bounded_without_eviction(tmp_path, binary):
    with start_server(tmp_path / "redis", binary=binary, max_memory=50 << 20) as server:
        settings = connect(server.url).config_get("maxmemory*")
        assert settings["maxmemory"] == str(50 << 20)
        assert settings["maxmemory-policy"] == "noeviction"


def test_an_address_is_needed(monkeypatch):
    for name in [*os.environ]:
        if "REDIS" in name:
            monkeypatch.delenv(name)
    with pytest.raises(InvalidInputError, match="REDIS_URL"):
        connect()
    with pytest.raises(InvalidInputError, match="must start with"):
        connect("http://localhost")
    with pytest.raises(InvalidInputError, match="does not exist"):
        connect("rediss://localhost", tls_ca="/nowhere.pem")


def test_the_environment_gives_address_and_password(tmp_path, monkeypatch):
    with start_server(tmp_path / "redis") as server:
        password = server.url.split(":")[2].split("@")[0]
        monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{server.port}/0")
        monkeypatch.setenv("REDIS_PASSWORD", password)
        assert connect().ping()


def _certificates(folder: Path) -> None:
    """A throw-away authority and a server certificate for 127.0.0.1 and localhost."""
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(subject: x509.Name, public_key) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    root = (
        certificate(name, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority, hashes.SHA256())
    )
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    leaf = (
        certificate(subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .sign(authority, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


@pytest.fixture
def tls_server(tmp_path: Path):
    """An external Redis that takes TLS only, with a password; (port, folder of its certificates)."""
    binary = server_binary("redis-server")
    _certificates(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "port": "0", "tls-port": str(port), "bind": "127.0.0.1", "requirepass": "a password", "save": "",
        "tls-cert-file": "server.pem", "tls-key-file": "server.key", "tls-ca-cert-file": "ca.pem",
        "tls-auth-clients": "no",
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    process = start_child([str(binary), *arguments], cwd=tmp_path, output=subprocess.DEVNULL)
    try:
        yield port, tmp_path
    finally:
        stop_child(process)


def test_an_external_server_with_password_and_tls(tls_server):
    port, folder = tls_server
    settings = RedisSettings(
        url=f"rediss://localhost:{port}/0", password="a password", tls_ca=folder / "ca.pem", retries=20
    )
    client = connect(settings)
    stream = TokenStream(client, "test")
    stream.add_samples([(index, sample_of(index)) for index in range(6)])
    settle_all(stream)
    with TokenFeed(stream, length=6, end=(1, 0), timeout_s=20) as feed:
        received = [payloads(sequence) for _, sequence in feed]
    assert received == [expected_payloads(sample_of(index)) for index in range(6)]
    with pytest.raises(UnavailableError, match="certificate verify failed"):
        connect(f"rediss://localhost:{port}", password="a password", retries=0)
    with pytest.raises(UnavailableError, match="refused the login"):
        connect(settings, password="another", retries=0)
    with pytest.raises(UnavailableError):
        connect(f"redis://localhost:{port}", password="a password", retries=0)


def test_a_child_that_ignores_sigterm_is_killed():
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('.', flush=True); time.sleep(600)"
    )
    read, write = os.pipe()
    child = start_child([sys.executable, "-c", program], output=write)
    os.close(write)
    with open(read, "rb") as output:
        assert output.readline() == b".\n"
    assert stop_child(child, grace_s=0.2) == -signal.SIGKILL
