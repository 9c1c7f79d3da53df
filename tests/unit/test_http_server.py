"""The metrics port: both families of addresses, and which setting an unusable address is blamed on."""

import errno
import socket
import urllib.request

import pytest

from kvstore.core.errors import ConfigError
from kvstore.http_server import HttpServer
from kvstore.proto import kvstore_pb2 as pb


def has_ipv6() -> bool:
    """Whether ::1 can be bound here."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "url_host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("", "127.0.0.1"),
        pytest.param("::1", "[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_it_answers_on_addresses_of_both_families(host: str, url_host: str) -> None:
    server = HttpServer(host, 0, pb.StatsReply)
    server.start()
    try:
        with urllib.request.urlopen(f"http://{url_host}:{server.port}/healthz", timeout=10) as answer:
            assert answer.read() == b"ok\n"
    finally:
        server.stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 64 + ".invalid", "::1:7"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^metrics_host: .*{host}") as error:
        HttpServer(host, 0, pb.StatsReply).start()

    assert error.value.fields["field"] == "metrics_host"
    assert error.value.fields["value"] == host


def test_a_family_that_the_kernel_lacks_is_the_hosts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ipv6(*_: object, **__: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("socketserver.socket.socket", without_ipv6)
    with pytest.raises(ConfigError, match=r"^metrics_host: .*not supported"):
        HttpServer("::1", 0, pb.StatsReply).start()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^metrics_port: .*port {port}: Address already in use") as error:
            HttpServer("127.0.0.1", port, pb.StatsReply).start()

    assert error.value.fields["field"] == "metrics_port"
    assert error.value.fields["value"] == port


def test_a_port_that_we_may_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("http.server.HTTPServer.server_bind", refuse)
    with pytest.raises(ConfigError, match=r"^metrics_port: .*port 80: Permission denied"):
        HttpServer("127.0.0.1", 80, pb.StatsReply).start()
