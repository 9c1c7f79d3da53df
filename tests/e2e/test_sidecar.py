"""A real sidecar: its start, its size, its end, and everything it serves beside the local socket."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sidecar_process import (
    BLOCK_NBYTES,
    ROOT,
    SPEC,
    SidecarProcess,
    connected,
    running_sidecar,
    tool,
    wait_until,
    wait_until_faulted,
)

from kvstore.cli.main import COMMANDS, SHORT_HELP
from kvstore.client import Client
from kvstore.config import Config
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import PeerUnavailable
from kvstore.dispatcher import Dispatcher
from kvstore.grpc_server import GrpcServer
from kvstore.proto import kvstore_pb2 as pb
from kvstore.sessions import Sessions
from kvstore.store import Store
from kvstore.tiers.arena import Arena
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations
from kvstore.transport.frames import Kind, Verb, encode_frame

pytestmark = pytest.mark.e2e

KEYS = SPEC.hash.hash_blocks(range(64))


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("sidecar"), "--metrics-port", str(free_port())) as process:
        yield process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def memory_bytes(pid: int, field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10


def test_hello_is_answered_within_a_second_of_the_start_and_memory_is_faulted_behind_it(tmp_path: Path) -> None:
    """The fastest of three starts, since the machine is shared; 1 GiB takes longer to fault than Hello may take."""
    took_s = []
    for number in range(3):
        sidecar = SidecarProcess(tmp_path / f"{number}.sock", arena="1GiB")
        client = Client(
            str(sidecar.socket), instance=uuid.uuid4().bytes, role=pb.BOTH, connect_deadline_s=5, call_deadline_s=5
        )
        started_s = time.monotonic()
        sidecar.spawn()
        try:
            while not client.connected and time.monotonic() < started_s + 20:
                try:
                    client.connect()
                except PeerUnavailable:
                    time.sleep(0.005)
            took_s.append(time.monotonic() - started_s)
            wait_until_faulted(client)
        finally:
            client.close()
            sidecar.stop()

    assert min(took_s) < 1.0, took_s


def test_memory_beside_the_arena_is_small(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as client:
        wait_until_faulted(client)

    resident = memory_bytes(sidecar.pid, "RssAnon") + memory_bytes(sidecar.pid, "RssFile")

    assert resident < 150 << 20


def test_the_arena_is_shared_populated_and_its_generations_are_read_only(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as writer, connected(sidecar) as reader:
        nbytes = wait_until_faulted(writer)
        assert writer.arena is not None
        assert reader.arena is not None
        wait_until(lambda: writer.arena.populated_nbytes == nbytes, "populated")  # type: ignore[union-attr]

        grant = writer.reserve("w", SPEC.namespace(), KEYS)
        for key, offset in zip(KEYS, grant.offsets.tolist(), strict=True):
            writer.arena.array[offset : offset + BLOCK_NBYTES] = key[0]
        assert writer.commit(grant.lease_id) == len(KEYS)
        lease = reader.acquire("r", SPEC.namespace(), KEYS)

        for key, offset, generation in zip(KEYS, lease.offsets.tolist(), lease.generations.tolist(), strict=True):
            assert reader.arena.generations[offset // 4096] == generation
            assert (reader.arena.array[offset : offset + BLOCK_NBYTES] == key[0]).all()
        assert not reader.arena.generations.flags.writeable
        reader.release(lease.lease_id, pb.LOADED)
        writer.drop(SPEC.namespace())


def test_an_expired_lease_is_expired_without_anybody_asking(sidecar: SidecarProcess) -> None:
    """By the timer: Stats does not expire leases itself."""
    with connected(sidecar) as client, tool(sidecar) as watcher:
        before = watcher.stats().counters["expired_leases_total"]
        lease = client.reserve("w", SPEC.namespace(), KEYS, ttl_s=0.2)

        wait_until(lambda: watcher.stats().counters["expired_leases_total"] == before + 1, "expired")

        assert 0 < lease.expires_in_s < 0.2 + 1e-6  # a difference of two readings of a clock that is a large number
        assert client.renew([lease.lease_id]) == [lease.lease_id]


def test_reconnecting_to_the_same_boot_keeps_the_mapping(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as client:
        arena, session_id = client.arena, client.session_id

        client.connect()

        assert client.arena is arena
        assert client.session_id != session_id


def test_a_restart_is_another_boot_with_another_arena(tmp_path: Path) -> None:
    with running_sidecar(tmp_path, "--no-grpc") as first:
        client = Client(
            str(first.socket), instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[SPEC], connect_deadline_s=5
        )
        client.connect()
        arena, boot_id = client.arena, client.boot_id
        assert arena is not None
        view = arena.array[:BLOCK_NBYTES]
        first.kill()
        with pytest.raises(PeerUnavailable):
            client.match(SPEC.namespace(), KEYS)
    with running_sidecar(tmp_path, "--no-grpc"):
        client.connect()

        assert client.boot_id != boot_id
        assert client.arena is not arena
        assert client.arena is not None
        assert client.arena.boot_id == client.boot_id
        view[:] = 1  # who kept the old mapping still has it
        assert not client.arena.array[:BLOCK_NBYTES].any()
        client.close()


def test_a_forked_child_does_not_inherit_the_mapping(sidecar: SidecarProcess) -> None:
    """In a process of its own, which forks; touching the mapping in the child is a fault, not a read."""
    code = f"""
import os, sys, uuid
from kvstore.client import Client
from kvstore.proto import kvstore_pb2 as pb
client = Client({str(sidecar.socket)!r}, instance=uuid.uuid4().bytes, role=pb.BOTH, connect_deadline_s=5)
client.connect()
client.arena.array[0]
child = os.fork()
if child == 0:
    client.arena.array[0]
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
    )

    assert int(outcome.stdout) == -11


def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(tmp_path: Path) -> None:
    """It asks again and again for 512 blocks' places and reads none of the answers."""
    with running_sidecar(tmp_path, "--no-grpc") as sidecar, connected(sidecar) as client:
        keys = SPEC.hash.hash_blocks(range(16 * 512))
        client.commit(client.reserve("w", SPEC.namespace(), keys).lease_id)
        hello = pb.HelloRequest(protocol_version=1, instance=bytes(16), role=pb.BOTH, specs=[SPEC.canonical()])
        ask = pb.AcquireRequest(request_id="r", namespace=SPEC.namespace(), keys=b"".join(keys))
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.settimeout(20)
            deaf.connect(str(sidecar.socket))
            deaf.sendall(encode_frame(Verb.HELLO, Kind.REQUEST, 1, hello.SerializeToString()))
            request = encode_frame(Verb.ACQUIRE, Kind.REQUEST, 2, ask.SerializeToString())

            def ask_and_watch() -> None:
                for _ in range(10_000):
                    deaf.sendall(request)
                    assert client.match(SPEC.namespace(), keys[:1]).num_blocks == 1

            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                ask_and_watch()

        assert "unread" in sidecar.log
        assert memory_bytes(sidecar.pid, "RssAnon") < 150 << 20


def test_sigterm_ends_it_soon_and_leaves_no_file(tmp_path: Path) -> None:
    with running_sidecar(tmp_path) as sidecar, connected(sidecar) as client:
        started_s = time.monotonic()

        assert sidecar.stop() == 0

        assert time.monotonic() - started_s < 3.0 + 1.0
        with pytest.raises(PeerUnavailable):
            client.stats()
    assert [path.name for path in tmp_path.iterdir()] == ["kvstore.log"]


def test_stat_prints_tables_and_json(sidecar: SidecarProcess) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "stat", "--socket", str(sidecar.socket)]

    table = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=ROOT)
    raw = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT)

    stats = json.loads(raw.stdout)
    assert "pinned" in table.stdout
    assert stats["tiers"][0]["name"] == "pinned"
    assert stats["tiers"][0]["capacity_bytes"] == 16 << 20
    assert len(bytes.fromhex(stats["boot_id"])) == 16


def test_errors_of_the_command_line_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "stat", "--socket", str(tmp_path / "none")]

    outcome = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)

    assert outcome.returncode == 2
    assert outcome.stderr == f"error: {tmp_path}/none: No such file or directory\n"


def test_help_lists_every_command_without_importing_any() -> None:
    code = """
import sys
sys.argv = ["kvstore", "--help"]
from kvstore.cli.main import main
try:
    main()
except SystemExit:
    slow = ("numpy", "grpc", "rich", "google", "kvstore.cli")
    print([name for name in sys.modules if name.startswith(slow)])
"""

    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
    )

    assert outcome.stdout.endswith("['kvstore.cli', 'kvstore.cli.main']\n")
    assert all(f"  {name} " in outcome.stdout for name in COMMANDS)
    assert COMMANDS.keys() == SHORT_HELP.keys()


def metrics(sidecar: SidecarProcess, page: str = "metrics") -> str:
    port = re.search(r"--metrics-port (\d+)", Path(f"/proc/{sidecar.pid}/cmdline").read_text().replace("\0", " "))[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=10) as reply:
        return reply.read().decode()


def test_metrics_are_what_stats_says(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as client:
        wait_until_faulted(client)
        client.commit(client.reserve("w", SPEC.namespace(), KEYS).lease_id)
        families = {family.name: family for family in text_string_to_metric_families(metrics(sidecar))}
        stats = client.stats()
        client.drop(SPEC.namespace())

    def value(family: str, **labels: str) -> float:
        (found,) = [
            sample.value
            for sample in families[family].samples
            if labels.items() <= sample.labels.items() and not sample.name.endswith("_created")
        ]
        return found

    assert value("kvstore_tier_capacity_bytes", tier="pinned") == 16 << 20
    assert value("kvstore_tier_bytes", tier="pinned", state="ready") == len(KEYS) * BLOCK_NBYTES
    assert value("kvstore_tier_blocks", tier="pinned", state="ready") == len(KEYS)
    assert value("kvstore_stored_blocks") == stats.counters["stored_blocks_total"]
    assert value("kvstore_calls", verb="commit") == stats.counters["calls_commit_total"]
    assert value("kvstore_sessions") == stats.num_sessions
    assert value("kvstore_sidecar_info", boot_id=stats.boot_id.hex()) == 1
    assert all(family.documentation for family in families.values())


def test_health_and_unknown_pages(sidecar: SidecarProcess) -> None:
    assert metrics(sidecar, "healthz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        metrics(sidecar, "nothing")


def test_a_sidecar_without_drives_is_ready_with_one_tier(sidecar: SidecarProcess) -> None:
    assert json.loads(metrics(sidecar, "readyz")) == {
        "ready": True,
        "problems": [],
        "tiers": {"pinned": {"state": "ready"}},
    }


def test_a_drive_that_is_lost_is_seen_everywhere_and_the_service_goes_on(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    flags = ["--nvme", str(drives[0]), "--nvme", str(drives[1]), "--nvme-bytes", "4MiB"]
    namespace = SPEC.namespace()

    def readiness(sidecar: SidecarProcess) -> dict[str, object]:
        answer = json.loads(metrics(sidecar, "readyz"))
        assert answer["ready"]
        return answer["tiers"]["nvme"]  # type: ignore[no-any-return]

    def ready(drive: Path) -> dict[str, str]:
        return {"path": str(drive), "state": "ready", "reason": ""}

    with running_sidecar(tmp_path, *flags, "--metrics-port", str(free_port())) as sidecar, connected(sidecar) as client:
        wait_until_faulted(client)
        wait_until(lambda: readiness(sidecar)["state"] == "ready", "recovered")
        assert readiness(sidecar)["drives"] == [ready(drive) for drive in drives]
        assert client.stats().tiers[1].capacity_bytes == 8 << 20

        (drives[1] / "blocks.kv").unlink()
        seeds = iter(range(1000))

        def degraded() -> bool:
            """A drive finds out when it writes."""
            client.commit(
                client.reserve(uuid.uuid4().hex, namespace, SPEC.hash.hash_blocks([next(seeds)] * 64)).lease_id
            )
            return readiness(sidecar)["state"] == "degraded"

        wait_until(degraded, "noticed")

        (lost,) = [drive for drive in readiness(sidecar)["drives"] if drive != ready(drives[0])]  # type: ignore[attr-defined]
        assert (lost["path"], lost["state"]) == (str(drives[1]), "degraded")
        assert "deleted" in lost["reason"]
        assert 'kvstore_nvme_problems_total{reason="deleted"} 1.0' in metrics(sidecar)
        assert f'kvstore_drive_state{{drive="{drives[1]}",state="degraded",tier="nvme"}} 1.0' in metrics(sidecar)
        command = [sys.executable, "-m", "kvstore.cli.main", "stat", "--socket", str(sidecar.socket)]
        table = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=ROOT)
        assert "degraded" in table.stdout
        assert metrics(sidecar, "healthz") == "ok\n"
        client.commit(client.reserve(uuid.uuid4().hex, namespace, KEYS).lease_id)
        assert client.match(namespace, KEYS).num_blocks == len(KEYS)
        assert sidecar.stop() == 0


@pytest.mark.parametrize(
    ("flags", "right"),
    [
        (("--nvme", "{}/none/drive"), "error: nvme: {}/none/drive: its parent does not exist"),
        (("--nvme", "{}/file"), "error: nvme: {}/file: is not a directory"),
        (("--nvme", "{}/drive", "--nvme", "{}/drive/../drive"), "error: nvme: "),
        (("--nvme", "{}/drive", "--nvme-bytes", "100TiB"), "error: nvme_bytes: "),
        (("--nvme", "{}/drive", "--nvme-bytes", "512KiB"), "error: nvme_bytes: "),
    ],
)
def test_drives_that_cannot_be_as_the_operator_wants_end_the_start(
    tmp_path: Path, flags: tuple[str, ...], right: str
) -> None:
    (tmp_path / "file").touch()
    sidecar = SidecarProcess(tmp_path / "kvstore.sock", *(flag.format(tmp_path) for flag in flags))

    sidecar.spawn()
    wait_until(lambda: not sidecar.alive(), "ended")

    assert sidecar.stop() == 2
    assert right.format(tmp_path) in sidecar.log
    assert "Traceback" not in sidecar.log
    assert not sidecar.socket.exists()


# --- gRPC ---------------------------------------------------------------------------------------------------------------


def verb(channel: grpc.Channel, name: str):
    return channel.unary_unary(
        f"/kvstore.v1.KVStore/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=getattr(pb, f"{name}Reply").FromString,
    )


def test_every_verb_is_served_over_grpc(sidecar: SidecarProcess) -> None:
    namespace = SPEC.namespace()
    with connected(sidecar) as writer, grpc.insecure_channel(f"unix:{sidecar.socket}.grpc") as channel:
        writer.commit(writer.reserve("w", namespace, KEYS).lease_id)
        hello = pb.HelloRequest(protocol_version=1, instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[SPEC.canonical()])
        reply = verb(channel, "Hello")(hello, timeout=5)
        session = {"metadata": (("kvstore-session", reply.session_token.decode()),), "timeout": 5}
        packed = b"".join(KEYS)

        matched = verb(channel, "Match")(pb.MatchRequest(namespace=namespace, keys=packed), **session)
        lease = verb(channel, "Acquire")(pb.AcquireRequest(request_id="r", namespace=namespace, keys=packed), **session)
        prefetched = verb(channel, "Prefetch")(pb.PrefetchRequest(namespace=namespace, keys=packed), **session)
        renewed = verb(channel, "Renew")(pb.RenewRequest(lease_ids=lease.lease_id.to_bytes(8, "little")), **session)
        verb(channel, "Release")(pb.ReleaseRequest(lease_id=lease.lease_id, outcome=pb.LOADED), **session)
        dropped = verb(channel, "Drop")(pb.DropRequest(namespace=namespace, all=True), **session)
        stats = verb(channel, "Stats")(pb.StatsRequest(), **session)

        assert matched.num_blocks == lease.num_blocks == dropped.num_dropped == len(KEYS)
        assert len(lease.offsets) == 8 * len(KEYS)
        assert (prefetched.num_blocks, prefetched.num_started) == (len(KEYS), 0)
        assert renewed.ended_lease_ids == b""
        assert stats.num_leases == 0
        assert {matched.boot_id, lease.boot_id, stats.boot_id} == {writer.boot_id}


def test_sockets_are_for_their_owner_only(sidecar: SidecarProcess) -> None:
    for path in (sidecar.socket, Path(f"{sidecar.socket}.grpc")):
        assert path.stat().st_mode & 0o777 == 0o600


def test_an_idle_grpc_session_ends_like_a_closed_connection(tmp_path: Path) -> None:
    """In this process, with a short idle time."""

    async def scenario() -> None:
        loop, clock = asyncio.get_running_loop(), MonotonicClock()
        with Arena(1 << 20, segment_bytes=1 << 20) as arena:
            slots = SegmentedSlots(
                arena.nbytes, segment_bytes=1 << 20, generations=SharedGenerations(arena.generations)
            )
            store = Store(pinned=slots)
            sessions = Sessions(store, loop=loop, clock=clock)
            dispatcher = Dispatcher(store=store, sessions=sessions, arena=arena, boot_id=bytes(16), clock=clock)
            server = GrpcServer(
                str(tmp_path / "g"),
                Config(),
                dispatcher=dispatcher,
                sessions=sessions,
                loop=loop,
                clock=clock,
                idle_s=1.0,
            )
            await asyncio.to_thread(server.start)
            try:
                await asyncio.to_thread(talk)
                assert len(sessions) == 0
            finally:
                await asyncio.to_thread(server.stop, 1.0)

    def talk() -> None:
        with grpc.insecure_channel(f"unix:{tmp_path}/g") as channel:
            hello = verb(channel, "Hello")(pb.HelloRequest(protocol_version=1, role=pb.TOOL), timeout=5)
            session = {"metadata": (("kvstore-session", hello.session_token.decode()),), "timeout": 5}
            until_s = time.monotonic() + 1.6
            while time.monotonic() < until_s:  # longer than the idle time, but never idle
                assert verb(channel, "Stats")(pb.StatsRequest(), **session).num_sessions == 1
                time.sleep(0.02)

            def ended() -> bool:
                time.sleep(1.2)  # idle for longer than a session may be
                try:
                    verb(channel, "Stats")(pb.StatsRequest(), **session)
                except grpc.RpcError as err:
                    return err.code() is grpc.StatusCode.UNAUTHENTICATED
                return False

            wait_until(ended, "session ended")

    asyncio.run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make certificates")
def test_tcp_needs_a_certificate_of_ours(tmp_path: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=30)

    for name in ("ca", "stranger"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")  # fmt: skip
    (tmp_path / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "peer"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "ext", "-out", f"{name}.pem")  # fmt: skip
    port = free_port()
    file = tmp_path / "kvstore.toml"
    file.write_text(
        f'grpc_tcp = "0.0.0.0:{port}"\ngrpc_tls_cert = "{tmp_path}/server.pem"\n'
        f'grpc_tls_key = "{tmp_path}/server.key"\ngrpc_tls_client_ca = "{tmp_path}/ca.pem"\n'
    )

    def hello(name: str | None) -> pb.HelloReply:
        own = {} if name is None else {
            "private_key": (tmp_path / f"{name}.key").read_bytes(), "certificate_chain": (tmp_path / f"{name}.pem").read_bytes()
        }  # fmt: skip
        credentials = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes(), **own)
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            reply: pb.HelloReply = verb(channel, "Hello")(pb.HelloRequest(protocol_version=1, role=pb.TOOL), timeout=5)
            return reply

    with running_sidecar(tmp_path, "--config", str(file)):
        assert len(hello("peer").session_token) == 32
        for name in (None, "stranger"):
            with pytest.raises(grpc.RpcError) as error:
                hello(name)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
