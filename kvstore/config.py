"""The sidecar's settings: one frozen type, read from a TOML file, the environment and flags, the later ones winning.

Every field has a unit, a default and a range here; nothing else in the project reads a setting. A field `x` is `x = ...`
in the file, `KVSTORE_X` in the environment, and a flag of `kvstore serve`, which makes its flags from `settings()`. Sizes may
be written as `512MiB` or `4GiB`; a list is an array in the file, separated by colons (directories) or commas (all else) in
the environment, a flag each.
"""

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.core.limits import (
    DEFAULT_LEASE_TTL_S,
    MAX_LEASE_TTL_S,
    MAX_LIMBO_FRACTION,
    SEGMENT_BYTES,
    SLOT_ALIGN_BYTES,
    UNVERIFIED_DRAIN_S,
)
from kvstore.eviction import DEFAULT_POLICY, POLICIES
from kvstore.tiers.hbm.memory import check_device

logger = logging.getLogger(__name__)

ENV_PREFIX = "KVSTORE_"
MAX_SOCKET_PATH_BYTES = 107  # sun_path of sockaddr_un, less its terminating zero
_DEFAULT_ARENA_BYTES = 1 << 30
_SIZE_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
_EVENTS_ADDRESS = re.compile(r"tcp://[^/\s]+:(\d{1,5}|\*)|ipc://\S+")
_LINKS = ("rdma", "tcp")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMATS = ("keyvalue", "json")
_WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
_MAX_DRIVES = 64  # each has threads of its own


def _doc(description: str, unit: str = "", *, choices: tuple[str, ...] = (), **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=description, extra={"unit": unit, "choices": choices}, **limits)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `kvstore serve`."""

    socket: Annotated[
        str, _doc("path of the local socket; empty: $XDG_RUNTIME_DIR/kvstore.sock or /tmp/kvstore-<uid>.sock")
    ] = ""
    arena_bytes: Annotated[
        int,
        _doc(
            "size of the arena; 0: 1 GiB or a quarter of the available memory, whichever is less",
            "bytes",
            ge=0,
            le=1 << 46,
        ),
    ] = 0
    segment_bytes: Annotated[
        int, _doc("part of the arena given to one block size at a time", "bytes", ge=16 * SLOT_ALIGN_BYTES, le=1 << 34)
    ] = SEGMENT_BYTES
    lease_ttl_s: Annotated[
        float, _doc("life of a lease whose request does not say", "seconds", gt=0, le=MAX_LEASE_TTL_S)
    ] = DEFAULT_LEASE_TTL_S
    limbo_fraction: Annotated[
        float, _doc("part of the arena that one engine's ended leases may keep in limbo", "fraction", gt=0, le=1)
    ] = MAX_LIMBO_FRACTION
    unverified_drain_s: Annotated[
        float,
        _doc(
            "wait before memory comes back from an engine whose processes cannot be watched", "seconds", ge=0, le=3600
        ),
    ] = UNVERIFIED_DRAIN_S
    eviction: Annotated[
        str,
        _doc("which blocks are given up when a tier is full (kvstore replay compares them)", choices=tuple(POLICIES)),
    ] = DEFAULT_POLICY
    tenant_quota: Annotated[
        float,
        _doc("part of a tier beyond which a tenant's own blocks go first, whoever needs room", "fraction", gt=0, le=1),
    ] = 1.0
    nvme: Annotated[
        tuple[str, ...],
        _doc("directories to keep blocks in, one on each drive; none: RAM only", "directories", max_length=_MAX_DRIVES),
    ] = ()
    nvme_bytes: Annotated[
        int,
        _doc(
            "size of the data file on each drive; 0: as it is, at first half of what is free there",
            "bytes",
            ge=0,
            le=1 << 48,
        ),
    ] = 0
    nvme_write_policy: Annotated[
        str,
        _doc(
            "when blocks are written to the drives: at once, when they are wanted again, or when RAM has no room",
            choices=_WRITE_POLICIES,
        ),
    ] = "write_through"
    nvme_write_bytes_per_s: Annotated[
        int, _doc("written to all drives together in a second; 0: no limit", "bytes", ge=0, le=1 << 48)
    ] = 0
    nvme_write_bytes_per_day: Annotated[
        int, _doc("written to all drives together in 24 hours; 0: no limit", "bytes", ge=0, le=1 << 60)
    ] = 0
    hbm_slab_bytes: Annotated[
        int,
        _doc("device memory in which the engines of one GPU share hot blocks; 0: none", "bytes", ge=0, le=1 << 40),
    ] = 0
    hbm_device: Annotated[str, _doc("where that lies: cuda:N, or host to try it without a GPU")] = "host"
    grpc: Annotated[bool, _doc("serve gRPC on <socket>.grpc")] = True
    grpc_tcp: Annotated[str, _doc("serve gRPC on this host:port too; empty: no")] = ""
    grpc_tls_cert: Annotated[str, _doc("PEM file with the certificate that gRPC over TCP shows")] = ""
    grpc_tls_key: Annotated[str, _doc("PEM file with its private key")] = ""
    grpc_tls_client_ca: Annotated[str, _doc("PEM file with the authorities that sign clients' certificates")] = ""
    node_id: Annotated[str, _doc("name of this node among its peers; empty: the host's name")] = ""
    peers: Annotated[
        tuple[str, ...],
        _doc("gRPC addresses of the nodes to share blocks with, host:port; this one may be among them", "addresses"),
    ] = ()
    directory: Annotated[
        tuple[str, ...],
        _doc("URLs of a Redis or Valkey server that tells the nodes of each other, instead of a list of peers", "URLs"),
    ] = ()
    directory_is_cluster: Annotated[bool, _doc("those URLs are of one Redis cluster")] = False
    cluster: Annotated[str, _doc("name of the cluster on the directory server")] = "default"
    advertise: Annotated[str, _doc("host:port at which peers reach this node's gRPC; empty: grpc_tcp")] = ""
    copies: Annotated[
        int, _doc("nodes that are to have a prefix which is read again and again, this one among them", ge=1, le=16)
    ] = 1
    copy_bytes_per_s: Annotated[
        int,
        _doc("that others are invited to fetch for such copies in a second; 0: no limit", "bytes", ge=0, le=1 << 40),
    ] = 256 << 20
    links: Annotated[
        tuple[str, ...], _doc("kinds of data links to offer, the preferred one first: rdma, tcp", max_length=2)
    ] = ("tcp",)
    link_hosts: Annotated[
        tuple[str, ...],
        _doc("addresses that the TCP link listens on, one for each network interface; none: that of grpc_tcp", "hosts"),
    ] = ()
    link_port: Annotated[int, _doc("port of the TCP link; 0: any", "port", ge=0, le=65535)] = 0
    peer_secret_file: Annotated[
        str, _doc("file with a secret that all nodes share; needed where there is no mutual TLS")
    ] = ""
    events: Annotated[
        str, _doc("address to publish KV events at, in vLLM's format, such as tcp://127.0.0.1:5557; empty: no")
    ] = ""
    events_replay: Annotated[str, _doc("address at which missed events are asked for; empty: no")] = ""
    events_topic: Annotated[str, _doc("topic that events are published under")] = ""
    record: Annotated[
        str,
        _doc("file to record requests in, hashes and no tokens, for kvstore replay and size; .gz: packed; empty: none"),
    ] = ""
    record_limit: Annotated[int, _doc("size at which the recording ends", "bytes", ge=1 << 16, le=1 << 40)] = 256 << 20
    metrics_port: Annotated[
        int, _doc("port of the dashboard (/), /metrics, /healthz and /readyz; 0: off", "port", ge=0, le=65535)
    ] = 0
    metrics_host: Annotated[str, _doc("address that the metrics port is bound to")] = "127.0.0.1"
    trace: Annotated[
        bool, _doc("send spans of requests that come with a trace context to the collector that OTEL_* variables name")
    ] = False
    log_level: Annotated[str, _doc("what is logged", choices=_LOG_LEVELS)] = "info"
    log_format: Annotated[str, _doc("how: lines of name=value, or a JSON object a line", choices=_LOG_FORMATS)] = (
        "keyvalue"
    )

    def __post_init__(self) -> None:
        for setting in settings():
            value = getattr(self, setting.name)
            if setting.choices and value not in setting.choices:
                raise _wrong(setting.name, value, setting.right)
        if self.segment_bytes % SLOT_ALIGN_BYTES:
            raise _wrong("segment_bytes", self.segment_bytes, f"use a multiple of {SLOT_ALIGN_BYTES}")
        if 0 < self.arena_bytes < self.segment_bytes:
            raise _wrong(
                "arena_bytes",
                format_size(self.arena_bytes),
                f"use at least one segment, {format_size(self.segment_bytes)}",
            )
        longest = MAX_SOCKET_PATH_BYTES - len(".grpc")
        if len(os.fsencode(self.socket)) > longest:
            raise _wrong("socket", self.socket, f"a Unix socket's path has at most {longest} bytes here")
        self._check_drives()
        check_device(self.hbm_device)
        if 0 < self.hbm_slab_bytes < self.segment_bytes:
            raise _wrong(
                "hbm_slab_bytes",
                format_size(self.hbm_slab_bytes),
                f"use at least one segment, {format_size(self.segment_bytes)}",
            )
        self._check_tcp()
        self._check_peers()
        self._check_events()

    def _check_drives(self) -> None:
        if "" in self.nvme:
            raise _wrong("nvme", "", "a directory's name is empty")
        places = [os.path.realpath(directory) for directory in self.nvme]
        twice = [directory for directory, place in zip(self.nvme, places, strict=True) if places.count(place) > 1]
        if twice:
            raise _wrong("nvme", ", ".join(twice), "name each directory once")
        if 0 < self.nvme_bytes < self.segment_bytes:
            raise _wrong(
                "nvme_bytes",
                format_size(self.nvme_bytes),
                f"use at least one segment, {format_size(self.segment_bytes)}",
            )

    def _check_tcp(self) -> None:
        tls = {name: getattr(self, name) for name in ("grpc_tls_cert", "grpc_tls_key", "grpc_tls_client_ca")}
        for name, value in tls.items():
            if bool(value) != any(tls.values()):
                raise _wrong(
                    name, value, "mutual TLS needs grpc_tls_cert, grpc_tls_key and grpc_tls_client_ca together"
                )
        if not self.grpc_tcp:
            return
        host, _, port = self.grpc_tcp.rpartition(":")
        if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
            raise _wrong("grpc_tcp", self.grpc_tcp, "use host:port, such as 0.0.0.0:7077")
        if host not in ("127.0.0.1", "localhost", "[::1]") and not any(tls.values()):
            raise _wrong("grpc_tcp", self.grpc_tcp, "an address beyond this host needs mutual TLS (grpc_tls_cert, ...)")

    def _check_peers(self) -> None:
        for kind in self.links:
            if kind not in _LINKS:
                raise _wrong("links", kind, f"use {' or '.join(_LINKS)}")
        if len(set(self.links)) != len(self.links) or not self.links:
            raise _wrong("links", ", ".join(self.links), "name one kind or both, each once")
        for address in self.peers:
            if not _is_address(address):
                raise _wrong("peers", address, "use host:port, such as 10.0.0.2:7077")
        if not (self.peers or self.directory):
            return
        if self.peers and self.directory:
            raise _wrong("directory", f"{len(self.directory)} URLs", "give peers or a directory server, not both")
        if not self.grpc_tcp:
            raise _wrong("grpc_tcp", "", "peers need an address to ask this node at")
        if not (self.peer_secret_file or self.grpc_tls_cert):
            raise _wrong("peer_secret_file", "", "peers need a shared secret or mutual TLS (grpc_tls_cert, ...)")
        self._check_reach()

    def _check_reach(self) -> None:
        for name in ("node_id", "cluster"):
            value = getattr(self, name)
            if value and not _NAME.fullmatch(value):
                raise _wrong(name, value[:200], "use 1 to 128 of letters, digits and . _ -")
        if not self.grpc:
            raise _wrong("grpc", "false", "peers ask this node over gRPC; leave it on")
        if self.advertise and not _is_address(self.advertise):
            raise _wrong("advertise", self.advertise, "use host:port, such as 10.0.0.1:7077")
        if not _can_be_reached(self.advertise or self.grpc_tcp):
            listens = f"grpc_tcp is {self.grpc_tcp}" if not self.advertise else "it is everybody's own"
            raise _wrong("advertise", self.advertise, f"{listens}; give the host:port at which peers reach this node")
        for host in self.link_hosts:
            if not host.isascii() or not _can_be_reached(f"{host}:1"):
                raise _wrong("link_hosts", host, "give an address of this node that peers reach, in ASCII")

    def _check_events(self) -> None:
        for name in ("events", "events_replay"):
            address = getattr(self, name)
            if address and not _EVENTS_ADDRESS.fullmatch(address):
                raise _wrong(name, address, "use tcp://host:port or ipc:///path, such as tcp://127.0.0.1:5557")
        if self.events_replay and self.events_replay == self.events and not self.events.endswith(":*"):
            raise _wrong("events_replay", self.events_replay, "use another address than that of events")
        if not self.events and (self.events_replay or self.events_topic):
            raise _wrong("events", "", "events_replay and events_topic are of no use without it")


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) <= 65535


def _can_be_reached(address: str) -> bool:
    """Whether others get here by it: no address of any interface, no port that is yet to be chosen."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") not in {"", "0.0.0.0", "::"} and int(port) > 0  # noqa: S104 - refused


class Setting(NamedTuple):
    """A field of Config, for help texts and error messages."""

    name: str
    base: type  # bool, int, float, str or tuple, which is a list of directories
    kind: Any  # that with its limits
    default: object
    unit: str
    choices: tuple[str, ...]  # empty: any in its range
    description: str
    right: str  # what a value must be, in words


def settings() -> Iterator[Setting]:
    """Every field of Config, in order."""
    for field in msgspec.structs.fields(Config):
        kind, meta = get_args(field.type)
        base = get_origin(kind) or kind
        unit, choices = meta.extra["unit"], meta.extra["choices"]
        right = _right(base, meta, unit, choices)
        yield Setting(field.name, base, field.type, field.default, unit, choices, meta.description, right)


def load_config(
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Settings from `file`, then `environ`, then `flags` (None values are skipped). Raises ConfigError, which names the
    field, the value, where it came from and what would be right."""
    known = {setting.name: setting for setting in settings()}
    chosen: dict[str, Any] = {}
    for source, given in (
        (f"in {file}", _read_toml(file) if file else {}),
        ("in the environment", _from_environment(environ or {}, known)),
        ("as a flag", {name: value for name, value in (flags or {}).items() if value is not None}),
    ):
        for name, value in given.items():
            if name not in known:
                raise _unknown(name, source, known)
            chosen[name] = _convert(known[name], value, source)
    return Config(**chosen)


def parse_size(text: str | int) -> int:
    """`4GiB`, `512 MiB`, `4096` -> bytes. Raises ValueError."""
    if isinstance(text, int):
        return text
    digits = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(digits) :].strip().upper()
    if unit in _SIZE_UNITS:
        return int(float(digits) * _SIZE_UNITS[unit])
    raise ValueError(f"unknown unit {unit!r}")


def format_size(nbytes: int) -> str:
    """The shortest exact way to write a size."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"


def default_socket_path() -> str:
    """$KVSTORE_SOCKET, or kvstore.sock in $XDG_RUNTIME_DIR, or /tmp/kvstore-<uid>.sock."""
    if path := os.environ.get(ENV_PREFIX + "SOCKET"):
        return path
    if runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        return str(Path(runtime_dir) / "kvstore.sock")
    return f"/tmp/kvstore-{os.getuid()}.sock"  # noqa: S108 - the server makes it 0600 and takes nobody else's


def arena_nbytes(config: Config, available_bytes: int) -> int:
    """The arena's size in whole segments. Raises ConfigError when it does not fit into `available_bytes`."""
    wanted = config.arena_bytes or min(_DEFAULT_ARENA_BYTES, available_bytes // 4)
    nbytes = wanted // config.segment_bytes * config.segment_bytes
    if nbytes > available_bytes:
        raise _wrong(
            "arena_bytes", config.arena_bytes, f"{available_bytes / (1 << 30):.1f}GiB of memory are available here"
        )
    if nbytes == 0:
        raise _wrong(
            "segment_bytes",
            format_size(config.segment_bytes),
            f"{wanted} bytes of arena have no room for one segment",
        )
    return nbytes


def _read_toml(file: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text())
    except (OSError, ValueError) as err:
        raise ConfigError(f"config: cannot read {file}: {err}", field="config", value=str(file)) from err


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, str | list[str]]:
    """KVSTORE_<FIELD>. Other names with the prefix are let pass unless they look like a misspelt field: a Kubernetes
    service called kvstore puts KVSTORE_PORT and more of the kind into every pod. One called kvstore-metrics puts
    KVSTORE_METRICS_PORT there, the name of a field: a `..._PORT` that is a URL is passed over with a warning."""
    found: dict[str, str | list[str]] = {}
    for variable, value in environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX):
            continue
        if name in known or difflib.get_close_matches(name, known, cutoff=0.85):
            if name.endswith("_port") and _SERVICE_LINK.match(value):
                logger.warning("%s=%s is a Kubernetes service link, not a setting of ours; ignored", variable, value)
            elif name in known and known[name].base is tuple:
                between = os.pathsep if known[name].unit == "directories" else ","
                found[name] = value.split(between) if value else []
            else:
                found[name] = value
    return found


def _convert(setting: Setting, value: object, source: str) -> object:
    try:
        if setting.unit == "bytes" and isinstance(value, str):
            value = parse_size(value)
        return msgspec.convert(value, setting.kind, strict=not isinstance(value, str))
    except (ValueError, OverflowError) as err:  # msgspec.ValidationError is a ValueError
        raise _wrong(setting.name, value, f"{source}: {setting.right}") from err


def _unknown(name: str, source: str, known: Mapping[str, Setting]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"{name}: not a setting ({source}); {hint}", field=name, value="")


def _wrong(field: str, value: object, right: str) -> ConfigError:
    return ConfigError(f"{field}: {value!r} is not right; {right}", field=field, value=str(value))


def _right(base: type, meta: msgspec.Meta, unit: str, choices: tuple[str, ...]) -> str:
    if choices:
        return f"use one of {', '.join(choices)}"
    if base is tuple:
        return f"use a list of at most {meta.max_length} {unit}"
    low = f"from {meta.ge}" if meta.ge is not None else f"above {meta.gt}" if meta.gt is not None else ""
    high = f"to {meta.le}" if meta.le is not None else ""
    kind = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}[base.__name__]
    if unit == "bytes":
        return f"use a size such as 4GiB, from {format_size(int(meta.ge or 0))} to {format_size(int(meta.le or 0))}"
    return " ".join(part for part in ("use", kind, low, high, f"({unit})" if unit else "") if part)
