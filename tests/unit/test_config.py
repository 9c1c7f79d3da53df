"""Settings: precedence, sizes, and errors that name field, value and what would be right."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cli.serve import _given, serve
from kvstore.config import (
    Config,
    arena_nbytes,
    default_socket_path,
    format_size,
    load_config,
    parse_size,
    settings,
)
from kvstore.core.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('arena_bytes = "2GiB"\nlease_ttl_s = 10\nmetrics_port = 9000\n')
    environ = {"KVSTORE_LEASE_TTL_S": "20", "KVSTORE_METRICS_PORT": "9001", "HOME": "/"}

    config = load_config(file=file, environ=environ, flags={"metrics_port": 9002, "log_level": None})

    assert (config.arena_bytes, config.lease_ttl_s, config.metrics_port, config.log_level) == (
        2 * GIB,
        20.0,
        9002,
        "info",
    )
    assert load_config() == Config()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 * GIB), ("512 MiB", 512 * MIB), ("1.5gib", 3 * GIB // 2), ("4096", 4096), (" 1TiB ", 1 << 40), (7, 7)],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@given(st.integers(1, 1 << 50))
def test_sizes_are_written_exactly(nbytes: int) -> None:
    text = format_size(nbytes)

    assert parse_size(text.removesuffix("B") if text.endswith("B") and "i" not in text else text) == nbytes


@pytest.mark.parametrize(
    ("flags", "field", "right"),
    [
        ({"arena_bytes": "4XiB"}, "arena_bytes", "size such as 4GiB"),
        ({"arena_bytes": "GiB"}, "arena_bytes", "size such as 4GiB"),
        ({"arena_bytes": "-1"}, "arena_bytes", "from 0"),
        ({"arena_bytes": "infGiB"}, "arena_bytes", "size such as 4GiB"),
        ({"arena_bytes": "1MiB"}, "arena_bytes", "at least one segment"),
        ({"segment_bytes": "1000000"}, "segment_bytes", "multiple of 4096"),
        ({"lease_ttl_s": 0.0}, "lease_ttl_s", "above 0"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s", "above 0"),
        ({"lease_ttl_s": 301.0}, "lease_ttl_s", "to 300"),
        ({"limbo_fraction": 1.5}, "limbo_fraction", "to 1"),
        ({"metrics_port": 70000}, "metrics_port", "to 65535"),
        ({"grpc": "maybe"}, "grpc", "true or false"),
        ({"log_level": "loud"}, "log_level", "debug, info, warning, error"),
        ({"socket": "/tmp/" + "x" * 120}, "socket", "at most 102 bytes"),
        ({"grpc_tcp": "7077"}, "grpc_tcp", "host:port"),
        ({"grpc_tcp": "0.0.0.0:7077"}, "grpc_tcp", "needs mutual TLS"),
        ({"grpc_tls_cert": "a.pem"}, "grpc_tls_key", "together"),
        ({"nvme": ["/a"] * 65}, "nvme", "a list of at most 64 directories"),
        ({"nvme": ["/a", ""]}, "nvme", "name is empty"),
        ({"nvme": ["/a", "/b", "/a/../b"]}, "nvme", "each directory once"),
        ({"nvme_bytes": "1MiB"}, "nvme_bytes", "at least one segment, 64MiB"),
        (
            {"nvme_write_policy": "write_never"},
            "nvme_write_policy",
            "write_through, write_through_selective, write_back",
        ),
        ({"nvme_write_bytes_per_s": "-1"}, "nvme_write_bytes_per_s", "from 0"),
    ],
)
def test_wrong_values_name_field_value_and_what_is_right(flags: dict[str, object], field: str, right: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(right)) as error:
        load_config(flags=flags)

    assert error.value.fields["field"] == field
    assert error.value.message.startswith(f"{field}: ")
    if field in flags and field != "nvme":  # of a list, the directory that is wrong
        assert error.value.fields["value"] == str(flags[field])


def test_a_list_is_an_array_in_the_file_and_separated_by_colons_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('nvme = ["/mnt/a", "/mnt/b"]\nnvme_bytes = "1TiB"')

    assert load_config(file=file) == Config(nvme=("/mnt/a", "/mnt/b"), nvme_bytes=1 << 40)
    assert load_config(file=file, environ={"KVSTORE_NVME": "/mnt/c:/mnt/d"}).nvme == ("/mnt/c", "/mnt/d")
    assert load_config(file=file, environ={"KVSTORE_NVME": ""}).nvme == ()
    assert load_config(file=file, flags={"nvme": ("/mnt/e",)}).nvme == ("/mnt/e",)


def test_addresses_and_urls_are_separated_by_commas_in_the_environment() -> None:
    environ = {f"KVSTORE_{name.upper()}": value for name, value in NODE.items()}
    two = {"KVSTORE_PEERS": "10.0.0.1:7077,[::1]:7", "KVSTORE_LINKS": "rdma,tcp", "KVSTORE_LINK_HOSTS": "::1,10.0.0.1"}
    config = load_config(environ=environ | two)
    assert config.peers == ("10.0.0.1:7077", "[::1]:7")
    assert config.links == ("rdma", "tcp")
    assert config.link_hosts == ("::1", "10.0.0.1")
    url = "redis://user:pass@h:6379/0"
    assert load_config(environ=environ | {"KVSTORE_DIRECTORY": url}).directory == (url,)


def test_a_string_where_a_list_is_expected_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('nvme = "/mnt/a:/mnt/b"')

    with pytest.raises(ConfigError, match=r"^nvme: '/mnt/a:/mnt/b' is not right; in .*: use a list"):
        load_config(file=file)


def test_a_directory_named_twice_through_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to("drive")

    with pytest.raises(ConfigError, match=r"^nvme: .*each directory once"):
        Config(nvme=(str(tmp_path / "drive"), str(tmp_path / "link")))


def flags_of(*arguments: str) -> Config:
    """The settings that `kvstore serve` gets from its command line alone."""
    given = serve.make_context("serve", list(arguments)).params
    given.pop("file")
    return load_config(flags=_given(given))


def test_every_setting_has_a_flag_that_sets_it() -> None:
    values: dict[str, object] = {
        "bool": False,
        "str": "text",
        "int": 7,
        "float": 0.5,
        "log_level": "debug",
        "log_format": "json",
        "hbm_device": "cuda:1",
        "eviction": "lru",
        "nvme_write_policy": "write_back",
        "grpc_tcp": "localhost:7",
        "events": "tcp://localhost:7",
        "events_replay": "tcp://localhost:8",
    }
    events = ("--events", "tcp://localhost:7")  # without which the others are of no use
    lists = {"peers": ("b:1", "a:2"), "directory": ("redis://b", "redis://a"), "links": ("tcp", "rdma")}
    names = {param.name: param.opts[0] for param in serve.params}
    for setting in settings():
        flag = names[setting.name]
        if setting.name.startswith("grpc_tls"):
            tls = ("--grpc-tls-cert", "a.pem", "--grpc-tls-key", "a.pem", "--grpc-tls-client-ca", "a.pem")
            assert getattr(flags_of(*tls), setting.name) == "a.pem"
        elif setting.base is tuple:
            first, second = lists.get(setting.name, ("/b", "/a"))
            node = ("--grpc-tcp", "localhost:7", "--peer-secret-file", "secret")
            assert getattr(flags_of(flag, first, flag, second, *node), setting.name) == (first, second)
        elif setting.base is bool:
            assert getattr(flags_of(f"--no-{flag[2:]}"), setting.name) is False
            assert getattr(flags_of(flag), setting.name) is True
        elif setting.unit == "bytes":
            assert getattr(flags_of(flag, "128MiB"), setting.name) == 128 * MIB
        else:
            value = values.get(setting.name, values[setting.base.__name__])
            needed = events if setting.name.startswith("events_") else ()
            assert getattr(flags_of(*needed, flag, str(value)), setting.name) == value


def test_a_flag_that_is_not_given_leaves_the_setting_to_the_others(tmp_path: Path) -> None:
    assert flags_of() == Config()
    assert flags_of("--arena", "4GiB", "--segment", "1MiB", "--socket", "/s") == Config(
        arena_bytes=4 * GIB, segment_bytes=MIB, socket="/s"
    )


def test_the_source_of_a_wrong_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text("metrics_port = true")

    with pytest.raises(ConfigError, match=re.escape(str(file))):
        load_config(file=file)
    with pytest.raises(ConfigError, match="in the environment"):
        load_config(environ={"KVSTORE_METRICS_PORT": "http"})


def test_unknown_names_are_errors_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('arena = "1GiB"')

    with pytest.raises(ConfigError, match="did you mean arena_bytes"):
        load_config(file=file)
    with pytest.raises(ConfigError, match="did you mean lease_ttl_s"):
        load_config(environ={"KVSTORE_LEASE_TTL": "3"})


def test_foreign_variables_with_the_prefix_are_let_pass() -> None:
    """Kubernetes puts these into every pod of a namespace that has a service called kvstore."""
    environ = {"KVSTORE_PORT": "tcp://10.0.0.1:80", "KVSTORE_SERVICE_HOST": "10.0.0.1", "KVSTORE_MODEL": "x.gguf"}

    assert load_config(environ=environ) == Config()


@pytest.mark.parametrize("scheme", ["tcp", "udp", "sctp"])
def test_a_service_link_with_the_name_of_a_setting_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    """From a Kubernetes service called kvstore-metrics."""
    environ = {"KVSTORE_METRICS_PORT": f"{scheme}://10.0.0.1:9090", "KVSTORE_LOG_LEVEL": "debug"}

    with caplog.at_level(logging.WARNING):
        assert load_config(environ=environ) == Config(log_level="debug")

    assert [record.getMessage() for record in caplog.records] == [
        f"KVSTORE_METRICS_PORT={scheme}://10.0.0.1:9090 is a Kubernetes service link, not a setting of ours; ignored"
    ]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KVSTORE_METRICS_PORT", "http://10.0.0.1:9090"), ("KVSTORE_GRPC_TCP", "tcp://10.0.0.1:7077")],
)
def test_no_other_url_is_taken_for_a_service_link(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(value)):
        load_config(environ={variable: value})


@pytest.mark.parametrize("text", ["arena_bytes = ", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=re.escape(str(file))):
        load_config(file=file)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(file=tmp_path / "none.toml")


def test_every_setting_has_a_description_and_a_default_in_its_range() -> None:
    for setting in settings():
        assert setting.description
        assert load_config(flags={setting.name: setting.default}) == Config()


def test_the_arena_is_sized_in_whole_segments_and_within_memory() -> None:
    config = Config(segment_bytes=64 * MIB)

    assert arena_nbytes(config, 64 * GIB) == GIB
    assert arena_nbytes(config, 2 * GIB) == 512 * MIB
    assert arena_nbytes(Config(arena_bytes=100 * MIB, segment_bytes=64 * MIB), GIB) == 64 * MIB
    with pytest.raises(ConfigError, match="available"):
        arena_nbytes(Config(arena_bytes=2 * GIB), GIB)
    with pytest.raises(ConfigError, match="no room for one segment"):
        arena_nbytes(config, 128 * MIB)


def test_the_socket_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SOCKET", "/a/b.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket_path() == "/a/b.sock"

    monkeypatch.delenv("KVSTORE_SOCKET")
    assert default_socket_path() == "/run/user/7/kvstore.sock"

    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert re.fullmatch(r"/tmp/kvstore-\d+\.sock", default_socket_path())


NODE = {"grpc_tcp": "localhost:7", "peer_secret_file": "secret"}
TLS = {"grpc_tls_cert": "a", "grpc_tls_key": "b", "grpc_tls_client_ca": "c"}


def test_a_node_that_listens_everywhere_says_where_it_is_reached() -> None:
    everywhere = {"grpc_tcp": "0.0.0.0:7", "advertise": "[fd00::1]:7", "link_hosts": ("::1",), "peers": ("b:1",)}
    config = Config(**(NODE | TLS | everywhere))  # type: ignore[arg-type]
    assert config.advertise == "[fd00::1]:7"


def test_a_directorys_password_is_in_no_error() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**NODE, peers=("b:1",), directory=("redis://:hidden@c",))  # type: ignore[arg-type]
    assert "hidden" not in f"{caught.value.message} {caught.value.fields}"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"peers": ("b",)}, "peers"),
        ({"peers": ("b:0",)}, "peers"),
        ({"peers": ("b:1",), "directory": ("redis://c",)}, "directory"),
        ({"peers": ("b:1",), "grpc_tcp": ""}, "grpc_tcp"),
        ({"directory": ("redis://c",), "peer_secret_file": ""}, "peer_secret_file"),
        ({"links": ("pigeon",)}, "links"),
        ({"links": ("tcp", "tcp")}, "links"),
        ({"links": ()}, "links"),
        ({"peers": ("b:1",), "advertise": "here"}, "advertise"),
        ({"peers": ("b:1",), "grpc": False}, "grpc"),
        ({"peers": ("b:1",), "node_id": "a\nlevel=ERROR"}, "node_id"),
        ({"peers": ("b:1",), "node_id": "a" * 129}, "node_id"),
        ({"directory": ("redis://c",), "cluster": "a b"}, "cluster"),
        ({"peers": ("b:1",), "advertise": "0.0.0.0:7"}, "advertise"),
        ({"peers": ("b:1",), "grpc_tcp": "localhost:0"}, "advertise"),
        ({"peers": ("b:1",), "grpc_tcp": "[::]:7", **TLS}, "advertise"),
        ({"peers": ("b:1",), "grpc_tcp": "0.0.0.0:7", **TLS}, "advertise"),
        ({"peers": ("b:1",), "link_hosts": ("0.0.0.0",)}, "link_hosts"),
        ({"peers": ("b:1",), "link_hosts": ("",)}, "link_hosts"),
        ({"peers": ("b:1",), "link_hosts": ("höst",)}, "link_hosts"),
    ],
)
def test_peers_that_cannot_work_are_refused_by_their_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**(NODE | given))
    assert caught.value.fields["field"] == field
