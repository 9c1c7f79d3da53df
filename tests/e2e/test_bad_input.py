"""Bad input over both carriers: a clear error, and the sidecar serves the next request."""

import dataclasses
import random
import socket
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from sidecar_process import SPEC, SidecarProcess, connected, running_sidecar, tool, wait_until

from kvstore.cli.serve import serve
from kvstore.client import Client
from kvstore.core.errors import ConfigError, KVStoreError, SpecMismatch, UnknownLease
from kvstore.core.limits import MAX_FRAME_BYTES
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.frames import FROM_SERVER, Frame, FrameDecoder, Kind, Verb, encode_frame

pytestmark = pytest.mark.e2e

ANSWER_DEADLINE_S = 5.0
KEYS = SPEC.hash.hash_blocks(range(64))
NAMESPACE = SPEC.namespace()
REPLIES = {verb: getattr(pb, f"{verb.name.title()}Reply") for verb in Verb}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("sidecar"), arena="4MiB") as process:
        yield process


@pytest.fixture(autouse=True)
def _serves_the_next_request(sidecar: SidecarProcess) -> Iterator[None]:
    """After every test here."""
    yield
    with tool(sidecar) as watcher:
        assert watcher.stats().counters.get("crashes_total", 0) == 0, sidecar.log


def hello(**changes: object) -> pb.HelloRequest:
    fields: dict[str, object] = {
        "protocol_version": 1,
        "instance": uuid.uuid4().bytes,
        "role": pb.BOTH,
        "specs": [SPEC.canonical()],
    }
    return pb.HelloRequest(**fields | changes)


class LocalCaller:
    """Says Hello and asks, over the local socket, without the client's care."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_DEADLINE_S)
        self.socket.connect(str(sidecar.socket))
        self._decoder = FrameDecoder(FROM_SERVER)

    def send(self, stream: bytes) -> None:
        self.socket.sendall(stream)

    def ask(self, verb: Verb, request: object) -> object:
        self.send(encode_frame(verb, Kind.REQUEST, 7, request.SerializeToString()))  # type: ignore[attr-defined]
        frame = self.receive()
        assert frame is not None, "closed"
        assert frame.call_id == 7
        if frame.kind is Kind.ERROR:
            return pb.ErrorReply.FromString(frame.body)
        return REPLIES[frame.verb].FromString(frame.body)

    def receive(self) -> Frame | None:
        """The next frame; None: closed."""
        while (frame := self._decoder.next_frame()) is None:
            try:
                chunk = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not chunk:
                return None
            self._decoder.feed(chunk)
        return frame

    def close(self) -> None:
        self.socket.close()


class GrpcCaller:
    """The same over gRPC."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self._channel = grpc.insecure_channel(f"unix:{sidecar.socket}.grpc")
        self.metadata: tuple[tuple[str, str], ...] = ()

    def ask(self, verb: Verb, request: object) -> object:
        try:
            reply = self.call(verb, request.SerializeToString())  # type: ignore[attr-defined]
        except grpc.RpcError as err:
            return self.error_of(err)
        if isinstance(reply, pb.HelloReply):
            self.metadata = (("kvstore-session", reply.session_token.decode()),)
        return reply

    def call(self, verb: Verb, body: bytes) -> object:
        method = self._channel.unary_unary(
            f"/kvstore.v1.KVStore/{verb.name.title()}", response_deserializer=REPLIES[verb].FromString
        )
        return method(body, metadata=self.metadata, timeout=ANSWER_DEADLINE_S)

    @staticmethod
    def error_of(err: grpc.RpcError) -> pb.ErrorReply:
        return pb.ErrorReply.FromString(dict(err.trailing_metadata())["kvstore-error-bin"])

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(params=[LocalCaller, GrpcCaller])
def caller(request: pytest.FixtureRequest, sidecar: SidecarProcess) -> Iterator[LocalCaller | GrpcCaller]:
    made = request.param(sidecar)
    yield made
    made.close()


OTHER_SPEC = dataclasses.replace(SPEC, weights="never opened")
CUT = SPEC.canonical()[:-5]
BIG = dataclasses.replace(SPEC, num_layers=1024)

HELLOS = [
    (hello(protocol_version=2), "RemoteProtocolError", "protocol_version"),
    (hello(instance=b"short"), "RemoteProtocolError", "instance"),
    (hello(instance=b""), "RemoteProtocolError", "instance"),
    (hello(role=pb.TOOL), "RemoteProtocolError", "instance"),
    (hello(role=pb.TOOL, instance=b"", want_arena=True), "RemoteProtocolError", "want_arena"),
    (hello(role=0), "RemoteProtocolError", "role"),
    (hello(role=99), "RemoteProtocolError", "role"),
    (hello(rank=1 << 20), "RemoteProtocolError", "rank"),
    (hello(tenant="t" * 300), "RemoteProtocolError", "tenant"),
    (hello(session_token=b"x"), "RemoteProtocolError", "session_token"),
    (hello(specs=[SPEC.canonical()] * 65), "RemoteProtocolError", "specs"),
    (hello(specs=[CUT]), "SpecMismatch", "spec"),
    (hello(specs=[b"[" * 100_000]), "SpecMismatch", "spec"),
    (hello(specs=[b"\xff\xfe"]), "SpecMismatch", "spec"),
    (hello(specs=[b"[]"]), "SpecMismatch", "hash."),
    (hello(specs=[SPEC.canonical().replace(b'"float16"', b'"float17"')]), "SpecMismatch", "dtype"),
    (hello(specs=[SPEC.canonical().replace(b'"xxh3_128"', b'"\\ud800"')]), "SpecMismatch", "hash.algorithm"),
    (hello(specs=[SPEC.canonical().replace(b'"head_dim":64', b'"head_dim":"64"')]), "SpecMismatch", "head_dim"),
    (hello(specs=[SPEC.canonical().replace(b'"head_dim":64', b'"head_dim":-64')]), "SpecMismatch", "head_dim"),
    (hello(specs=[SPEC.canonical().replace(b'"head_dim"', b'"dim"')]), "SpecMismatch", "head_dim dim"),
    (hello(specs=[BIG.canonical()]), "SpecMismatch", "block_nbytes"),
]


@pytest.mark.parametrize(
    ("request_", "code", "field"), HELLOS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_hello_is_refused_by_field(
    caller: LocalCaller | GrpcCaller, request_: pb.HelloRequest, code: str, field: str
) -> None:
    error = caller.ask(Verb.HELLO, request_)

    assert isinstance(error, pb.ErrorReply)
    assert error.code == code
    assert error.fields["field"] in field.split()
    assert error.fields["field"].rstrip(".") in error.message


def match(**changes: object) -> pb.MatchRequest:
    return pb.MatchRequest(**{"namespace": NAMESPACE, "keys": b"".join(KEYS)} | changes)


def acquire(**changes: object) -> pb.AcquireRequest:
    return pb.AcquireRequest(**{"request_id": "r", "namespace": NAMESPACE, "keys": b"".join(KEYS)} | changes)


def prefetch(**changes: object) -> pb.PrefetchRequest:
    return pb.PrefetchRequest(**{"namespace": NAMESPACE, "keys": b"".join(KEYS)} | changes)


CALLS = [
    (Verb.MATCH, match(namespace=b""), "RemoteProtocolError", "namespace"),
    (Verb.MATCH, match(namespace=OTHER_SPEC.namespace()), "SpecMismatch", "namespace"),
    (Verb.MATCH, match(keys=b"x" * 17), "SpecMismatch", "keys"),
    (Verb.MATCH, match(keys=bytes(16 * 65537)), "Overloaded", "MAX_KEYS_PER_CALL"),
    (
        Verb.MATCH,
        match(wish=pb.PlanWish(request_id="r", num_tokens=9, label="\x1b[31m")),
        "RemoteProtocolError",
        "wish.label",
    ),
    (
        Verb.MATCH,
        match(wish=pb.PlanWish(request_id="r", num_tokens=9, label="x" * 65)),
        "RemoteProtocolError",
        "wish.label",
    ),
    (Verb.ACQUIRE, acquire(request_id=""), "RemoteProtocolError", "request_id"),
    (Verb.ACQUIRE, acquire(request_id="é" * 129), "RemoteProtocolError", "request_id"),
    (Verb.ACQUIRE, acquire(first_needed=5), "RemoteProtocolError", "first_needed"),
    (Verb.ACQUIRE, acquire(ttl_s=float("nan")), "RemoteProtocolError", "ttl_s"),
    (Verb.ACQUIRE, acquire(ttl_s=-1.0), "RemoteProtocolError", "ttl_s"),
    (Verb.ACQUIRE, acquire(ttl_s=float("inf")), "RemoteProtocolError", "ttl_s"),
    (Verb.ACQUIRE, acquire(order=9), "RemoteProtocolError", "order"),
    (Verb.PIN, pb.PinRequest(namespace=b"short"), "RemoteProtocolError", "namespace"),
    (Verb.PIN, pb.PinRequest(namespace=SPEC.namespace(), keys=b"x" * 15), "SpecMismatch", "keys"),
    (Verb.PIN, pb.PinRequest(namespace=SPEC.namespace(), pin_s=-1.0), "RemoteProtocolError", "pin_s"),
    (Verb.PIN, pb.PinRequest(namespace=SPEC.namespace(), pin_s=float("nan")), "RemoteProtocolError", "pin_s"),
    (Verb.PIN, pb.PinRequest(namespace=SPEC.namespace(), pin_s=1.0, cool=True), "RemoteProtocolError", "cool"),
    (Verb.PREFETCH, prefetch(namespace=b"short"), "RemoteProtocolError", "namespace"),
    (Verb.PREFETCH, prefetch(namespace=OTHER_SPEC.namespace()), "SpecMismatch", "namespace"),
    (Verb.PREFETCH, prefetch(keys=b"x" * 15), "SpecMismatch", "keys"),
    (Verb.PREFETCH, prefetch(keys=bytes(16 * 65537)), "Overloaded", "MAX_KEYS_PER_CALL"),
    (Verb.PREFETCH, prefetch(first_needed=5), "RemoteProtocolError", "first_needed"),
    (Verb.RELEASE, pb.ReleaseRequest(lease_id=1 << 60, outcome=pb.LOADED), "UnknownLease", ""),
    (Verb.RELEASE, pb.ReleaseRequest(lease_id=0, outcome=pb.LOADED), "UnknownLease", ""),
    (Verb.RELEASE, pb.ReleaseRequest(lease_id=1), "RemoteProtocolError", "outcome"),
    (Verb.RENEW, pb.RenewRequest(lease_ids=b"1234567"), "RemoteProtocolError", "lease_ids"),
    (Verb.RENEW, pb.RenewRequest(lease_ids=bytes(8 * 8193)), "Overloaded", "MAX_LEASES_PER_INSTANCE"),
    (Verb.COMMIT, pb.CommitRequest(lease_id=99), "UnknownLease", ""),
    (Verb.COMMIT, pb.CommitRequest(lease_id=99, keys=b"x"), "UnknownLease", ""),
    (Verb.ABORT, pb.AbortRequest(lease_id=99), "UnknownLease", ""),
    (Verb.DROP, pb.DropRequest(namespace=NAMESPACE), "RemoteProtocolError", "all"),
    (Verb.DROP, pb.DropRequest(namespace=NAMESPACE, keys=KEYS[0], all=True), "RemoteProtocolError", "all"),
    (
        Verb.RESERVE,
        pb.ReserveRequest(request_id="w", namespace=NAMESPACE, keys=KEYS[0]),
        "RemoteProtocolError",
        "want_arena",
    ),
]


@pytest.mark.parametrize(
    ("verb", "request_", "code", "field"), CALLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_field_is_named_and_the_session_goes_on(
    caller: LocalCaller | GrpcCaller, verb: Verb, request_: object, code: str, field: str
) -> None:
    assert isinstance(caller.ask(Verb.HELLO, hello()), pb.HelloReply)

    error = caller.ask(verb, request_)

    assert isinstance(error, pb.ErrorReply)
    assert error.code == code
    assert not field or field in (error.fields.get("field"), error.fields.get("limit"))
    assert field in error.message or error.code == "Overloaded"
    assert caller.ask(Verb.MATCH, match()) == pb.MatchReply(boot_id=error.boot_id)


def test_a_prefetch_of_what_is_not_held_starts_nothing(caller: LocalCaller | GrpcCaller) -> None:
    assert isinstance(caller.ask(Verb.HELLO, hello()), pb.HelloReply)

    for request in (prefetch(), prefetch(keys=b""), prefetch(first_needed=len(KEYS))):
        reply = caller.ask(Verb.PREFETCH, request)

        assert isinstance(reply, pb.PrefetchReply)
        assert (reply.num_blocks, reply.num_started) == (0, 0)


WRITES = [
    ({"parent": b"x"}, "RemoteProtocolError", "parent"),
    ({"keys": b""}, "ProtocolError", "keys"),
    ({"keys": KEYS[0] * 2}, "ProtocolError", "keys"),
    ({"keys": KEYS[0][:-1]}, "SpecMismatch", "keys"),
    ({"ttl_s": -0.5}, "RemoteProtocolError", "ttl_s"),
    ({"request_id": ""}, "RemoteProtocolError", "request_id"),
]


@pytest.mark.parametrize(("changes", "code", "field"), WRITES)
def test_a_wrong_reserve_reserves_nothing(
    sidecar: SidecarProcess, changes: dict[str, object], code: str, field: str
) -> None:
    with connected(sidecar) as client:
        fields: dict[str, object] = {"request_id": "w", "namespace": NAMESPACE, "keys": b"".join(KEYS)}
        arguments = fields | changes
        positional = [arguments.pop(name) for name in ("request_id", "namespace", "keys")]

        with pytest.raises(KVStoreError) as error:
            client.reserve(*positional, **arguments)  # type: ignore[arg-type]

        assert (error.value.code, error.value.fields["field"]) == (code, field)
        assert client.stats().tiers[0].writing_bytes == 0
        assert client.stats().num_leases == 0


def test_a_lease_of_another_engine_is_unknown(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as owner, connected(sidecar) as stranger:
        lease_id = owner.reserve("w", NAMESPACE, KEYS).lease_id

        for call in (stranger.commit, stranger.abort, lambda lease: stranger.release(lease, pb.LOADED)):
            with pytest.raises(UnknownLease):
                call(lease_id)
        assert stranger.renew([lease_id]) == [lease_id]

        owner.abort(lease_id)


def test_a_truncated_key_in_commit_publishes_nothing(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as client:
        lease_id = client.reserve("w", NAMESPACE, KEYS).lease_id

        with pytest.raises(SpecMismatch, match="keys"):
            client.commit(lease_id, KEYS[0][:-3])
        with pytest.raises(KVStoreError, match="keys"):
            client.commit(lease_id, [bytes(16)])

        assert client.match(NAMESPACE, KEYS).num_blocks == 0
        client.abort(lease_id)


def test_specs_that_differ_in_one_field_never_share_and_the_field_is_named(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as client:
        client.commit(client.reserve("w", NAMESPACE, KEYS).lease_id)
        for field, value in {"dtype": "bfloat16", "num_kv_heads": 4, "weights": "others"}.items():
            spec = dataclasses.replace(SPEC, **{field: value})

            with connected(sidecar, spec=spec) as other:
                (info,) = other.namespaces
                (near,) = [miss for miss in info.near_misses if miss.namespace == NAMESPACE]

                assert info.namespace != NAMESPACE
                assert info.num_blocks == 0
                assert near.differing_fields == (field,)
                assert near.num_blocks == len(KEYS)
                assert other.match(info.namespace, KEYS).num_blocks == 0
                with pytest.raises(SpecMismatch, match="namespace"):
                    other.match(NAMESPACE, KEYS)
        client.drop(NAMESPACE)


def valid_stream() -> bytes:
    return encode_frame(Verb.HELLO, Kind.REQUEST, 1, hello().SerializeToString())


BROKEN = {
    "garbage": bytes(range(256)) * 16,
    "oversized": struct.pack("<IBBHI", MAX_FRAME_BYTES + 1, 1, 0, 0, 1),
    "endless": struct.pack("<IBBHI", 0xFFFFFFFF, 1, 0, 0, 1),
    "unknown verb": struct.pack("<IBBHI", 0, 99, 0, 0, 1),
    "reply": struct.pack("<IBBHI", 0, 1, 1, 0, 1),
    "reserved bytes": struct.pack("<IBBHI", 0, 1, 0, 1, 1),
    "call id 0": struct.pack("<IBBHI", 0, 1, 0, 0, 0),
}


@pytest.mark.parametrize("stream", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("after_hello", [False, True])
def test_a_broken_frame_is_answered_if_its_call_id_is_known_and_the_connection_closed(
    sidecar: SidecarProcess, stream: bytes, *, after_hello: bool
) -> None:
    caller = LocalCaller(sidecar)
    try:
        if after_hello:
            assert isinstance(caller.ask(Verb.HELLO, hello()), pb.HelloReply)
        call_id = int.from_bytes(stream[8:12], "little")

        caller.send(stream)

        if call_id:
            answer = caller.socket.recv(1 << 16)  # its verb may be unknown to our own decoder
            assert (answer[5], answer[8:12]) == (Kind.ERROR, stream[8:12])
            assert pb.ErrorReply.FromString(answer[12:]).code == "RemoteProtocolError"
        assert caller.receive() is None
    finally:
        caller.close()


def test_a_first_frame_that_is_not_hello_is_refused(sidecar: SidecarProcess) -> None:
    caller = LocalCaller(sidecar)
    try:
        error = caller.ask(Verb.STATS, pb.StatsRequest())

        assert isinstance(error, pb.ErrorReply)
        assert (error.code, error.fields["field"]) == ("RemoteProtocolError", "verb")
        assert caller.receive() is None
    finally:
        caller.close()


def test_a_second_hello_is_refused_and_the_session_goes_on(sidecar: SidecarProcess) -> None:
    caller = LocalCaller(sidecar)
    try:
        caller.ask(Verb.HELLO, hello())

        error = caller.ask(Verb.HELLO, hello())

        assert isinstance(error, pb.ErrorReply)
        assert (error.code, error.fields["field"]) == ("RemoteProtocolError", "verb")
        assert isinstance(caller.ask(Verb.STATS, pb.StatsRequest()), pb.StatsReply)
    finally:
        caller.close()


def test_a_body_that_does_not_parse_is_refused_and_the_session_goes_on(sidecar: SidecarProcess) -> None:
    caller = LocalCaller(sidecar)
    try:
        caller.ask(Verb.HELLO, hello())
        caller.send(encode_frame(Verb.MATCH, Kind.REQUEST, 3, b"\xff\xff\xff"))

        answer = caller.receive()

        assert answer is not None
        assert answer.kind is Kind.ERROR
        assert pb.ErrorReply.FromString(answer.body).fields["field"] == "body"
        assert isinstance(caller.ask(Verb.STATS, pb.StatsRequest()), pb.StatsReply)
    finally:
        caller.close()


def test_frames_in_one_write_are_answered_in_order(sidecar: SidecarProcess) -> None:
    """Also those that come in one piece with Hello, and more than one turn's worth."""
    caller = LocalCaller(sidecar)
    requests = [encode_frame(Verb.MATCH, Kind.REQUEST, number, match().SerializeToString()) for number in range(2, 302)]
    try:
        caller.send(valid_stream() + b"".join(requests))

        answers = [caller.receive() for _ in range(301)]

        assert [answer.call_id for answer in answers if answer] == list(range(1, 302))
        assert all(answer.kind is Kind.REPLY for answer in answers if answer)
    finally:
        caller.close()


@pytest.mark.parametrize("body", [b"", b"\xff" * 100, b"\x08\x01\x12\x10short"])
def test_garbage_over_grpc_is_refused(sidecar: SidecarProcess, body: bytes) -> None:
    caller = GrpcCaller(sidecar)
    try:
        with pytest.raises(grpc.RpcError) as error:
            caller.call(Verb.HELLO, body)

        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caller.error_of(error.value).code == "RemoteProtocolError"
    finally:
        caller.close()


@pytest.mark.parametrize("token", ["", "0" * 32])
def test_grpc_without_a_session_is_unauthenticated(sidecar: SidecarProcess, token: str) -> None:
    caller = GrpcCaller(sidecar)
    caller.metadata = (("kvstore-session", token),) if token else ()
    try:
        with pytest.raises(grpc.RpcError) as error:
            caller.call(Verb.STATS, b"")

        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "kvstore-session" in error.value.details()
    finally:
        caller.close()


def test_a_thousand_mutations_of_valid_frames(sidecar: SidecarProcess) -> None:
    """Whatever comes, each connection is answered or closed, and the next one is served."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    requests = [encode_frame(verb, Kind.REQUEST, 2, request.SerializeToString()) for verb, request, _, _ in CALLS]  # type: ignore[attr-defined]
    outcomes = {"answered": 0, "closed": 0}
    with tool(sidecar) as watcher:
        sessions_before = watcher.stats().num_sessions  # gRPC's from other tests among them

    for _ in range(1000):
        stream = bytearray(valid_stream() + rng.choice(requests) + encode_frame(Verb.STATS, Kind.REQUEST, 3, b""))
        mutate(rng, stream)
        caller = LocalCaller(sidecar)
        try:
            caller.send(stream)
            caller.socket.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: caller.socket.recv(1 << 16), b""))  # noqa: B023
        except (BrokenPipeError, ConnectionResetError):
            received = b""
        finally:
            caller.close()
        outcomes["answered" if received else "closed"] += 1

    assert outcomes["answered"] > 500
    with tool(sidecar) as watcher:
        wait_until(lambda: watcher.stats().num_sessions == sessions_before, "all sessions ended")
        wait_until(lambda: watcher.stats().num_leases == 0, "all leases ended")


def mutate(rng: random.Random, stream: bytearray) -> None:
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(stream))
        match rng.randrange(4):
            case 0:
                stream[at] ^= 1 << rng.randrange(8)
            case 1:
                del stream[at : at + rng.randrange(1, 20)]
            case 2:
                stream[at:at] = rng.randbytes(rng.randrange(1, 20))
            case 3:
                del stream[at:]
        if not stream:
            stream += b"\0"


def test_half_a_frame_and_silence_is_closed_in_time(tmp_path: Path) -> None:
    """Before Hello at HELLO_DEADLINE_S; other connections are served meanwhile."""
    with running_sidecar(tmp_path, "--no-grpc") as sidecar:
        silent, half = LocalCaller(sidecar), LocalCaller(sidecar)
        half.send(valid_stream()[:-1])
        try:
            with connected(sidecar) as client:
                assert client.match(NAMESPACE, KEYS).num_blocks == 0
            for caller in (silent, half):
                caller.socket.settimeout(20)
                assert caller.receive() is None
        finally:
            silent.close()
            half.close()


def run_serve(*flags: str) -> Callable[[], object]:
    return lambda: CliRunner().invoke(serve, flags, catch_exceptions=False, standalone_mode=False)


def test_a_taken_socket_names_itself_and_its_owner_lives(sidecar: SidecarProcess) -> None:
    with pytest.raises(ConfigError, match="running sidecar") as error:
        run_serve("--socket", str(sidecar.socket), "--arena", "64MiB")()

    assert error.value.fields["value"] == str(sidecar.socket)
    assert sidecar.alive()


def test_an_arena_larger_than_memory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"arena_bytes.*available"):
        run_serve("--socket", str(tmp_path / "s"), "--arena", "8TiB")()

    assert not (tmp_path / "s").exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")

    with pytest.raises(ConfigError, match="no socket"):
        run_serve("--socket", str(path), "--arena", "64MiB")()

    assert path.read_text() == "precious"


def test_a_socket_left_by_a_killed_sidecar_is_taken_over(tmp_path: Path) -> None:
    first = SidecarProcess(tmp_path / "kvstore.sock", "--no-grpc")
    first.start()
    first.kill()
    assert first.socket.exists()

    with running_sidecar(tmp_path, "--no-grpc") as second, tool(second) as watcher:
        assert watcher.stats().num_sessions == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kvstore.log"]


def test_a_taken_grpc_address_ends_the_start_with_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        with pytest.raises(ConfigError, match="grpc_tcp"):
            run_serve("--socket", str(tmp_path / "s"), "--arena", "64MiB", "--grpc-tcp", address)()

    assert list(tmp_path.iterdir()) == []


def test_no_sidecar_is_one_line_of_error(tmp_path: Path) -> None:
    client = Client(str(tmp_path / "nobody.sock"), role=pb.TOOL)

    with pytest.raises(KVStoreError, match=r"nobody\.sock: No such file"):
        client.connect()
