"""Two network namespaces joined by a cable that can be cut, slowed down, delayed, and made to lose packets."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest
from cluster_nodes import ClusterNode
from sidecar_process import read_line

HOSTS = ("10.213.7.1", "10.213.7.2")
PORT = 7077
CALL_DEADLINE_S = 20.0
SEED = 7
_CABLE = Path(__file__).parent / "tun_cable.py"


class Refused(Exception):
    """This machine does not do that."""


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_DEADLINE_S, check=False)
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class Network:
    """`namespaces` and `HOSTS`, end by end. A veth pair; with `tun` two devices that tun_cable.py joins."""

    def __init__(self, name: str, *, tun: bool = False) -> None:
        name += str(os.getpid())  # what a killed run left is in nobody's way
        self.namespaces = (f"{name}a", f"{name}b")
        self._devices = (f"{name}0", f"{name}1")
        self._stack = contextlib.ExitStack()
        self._cable: subprocess.Popen[str] | None = None
        self._tun = tun

    def make(self) -> None:
        """Raises Refused."""
        for namespace in self.namespaces:
            run("ip", "netns", "add", namespace)
            self._stack.callback(run, "ip", "netns", "del", namespace)
        if self._tun:
            self._open_cable()
        else:
            run("ip", "link", "add", self._devices[0], "type", "veth", "peer", "name", self._devices[1])
        for namespace, device in zip(self.namespaces, self._devices, strict=True):
            run("ip", "link", "set", device, "netns", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        self.heal()

    def cut(self) -> None:
        """Nothing passes any more, in either direction."""
        run("ip", "-n", self.namespaces[0], "link", "set", self._devices[0], "down")

    def heal(self) -> None:
        """An interface that was down has lost its route."""
        for here, there, namespace, device in zip(HOSTS, HOSTS[::-1], self.namespaces, self._devices, strict=True):
            run("ip", "-n", namespace, "address", "replace", f"{here}/32", "peer", there, "dev", device)
            run("ip", "-n", namespace, "link", "set", device, "up")
            run("ip", "-n", namespace, "route", "replace", there, "dev", device)

    def limit(self, bytes_per_s: int) -> None:
        """Either way; 0: no limit."""
        rate = ("tbf", "rate", f"{8 * bytes_per_s}bit", "burst", "64kb", "latency", "50ms")
        self._discipline(*(rate if bytes_per_s else ()))

    def disturb(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Either way."""
        if self._cable is None:
            self._discipline("netem", "delay", f"{delay_s * 1e3}ms", "loss", f"{loss:.0%}")
            return
        for line in (f"delay {delay_s}", f"loss {loss}"):
            _pipe(self._cable.stdin).write(line + "\n")
            _pipe(self._cable.stdin).flush()
            assert read_line(self._cable, CALL_DEADLINE_S) == "ok"

    def close(self) -> None:
        if self._cable is not None:
            self._cable.kill()
            self._cable.communicate(timeout=CALL_DEADLINE_S)
        self._stack.close()

    def _discipline(self, *words: str) -> None:
        for namespace, device in zip(self.namespaces, self._devices, strict=True):
            at = ("dev", device, "root")
            if words:
                run("tc", "-n", namespace, "qdisc", "replace", *at, *words)
            else:
                run("tc", "-n", namespace, "qdisc", "del", *at)

    def _open_cable(self) -> None:
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            raise Refused("/dev/net/tun: no access")
        self._cable = subprocess.Popen(
            [sys.executable, str(_CABLE), *self._devices, str(SEED)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if read_line(self._cable, CALL_DEADLINE_S) != "ready":
            raise Refused("/dev/net/tun: no devices can be made")


@contextlib.contextmanager
def network(name: str, *, disturbed: bool = False) -> Iterator[Network]:
    """Skips, with the reason, where this machine does not let us. `disturbed`: its cable can delay and lose."""
    for program in ("ip", "tc", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: sh tests/setup_debian.sh")
    made = Network(name, tun=disturbed and not _has_netem(f"{name}{os.getpid()}p"))
    try:
        try:
            made.make()
        except Refused as err:
            pytest.skip(f"no network namespaces here: {err}")
        yield made
    finally:
        made.close()


def _has_netem(namespace: str) -> bool:
    try:
        run("ip", "netns", "add", namespace)
    except Refused:
        return True  # what is refused is told when the network is made
    try:
        run("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except Refused:
        return False
    finally:
        run("ip", "netns", "del", namespace)
    return True


class FarNode(ClusterNode):
    """A sidecar in a namespace. Its local socket is reached from everywhere, as all Unix sockets."""

    def __init__(self, folder: Path, name: str, namespace: str, host: str, flags: Sequence[str]) -> None:
        super().__init__(folder, name, PORT, [*flags, "--grpc-tcp", f"{host}:{PORT}"], "16MiB")
        self.address = f"{host}:{PORT}"
        self._command = ["ip", "netns", "exec", namespace, *self._command]


@contextlib.contextmanager
def nodes_in(net: Network, folder: Path) -> Iterator[tuple[FarNode, FarNode]]:
    """A node at each end, with certificates, which addresses beyond the host need, and a list of both."""
    peers = [word for host in HOSTS for word in ("--peers", f"{host}:{PORT}")]
    with contextlib.ExitStack() as stack:
        made = []
        for number, (namespace, host) in enumerate(zip(net.namespaces, HOSTS, strict=True)):
            flags = [*make_certificate(folder, f"n{number}", host), *peers]
            node = FarNode(folder, f"n{number}", namespace, host, flags)
            stack.callback(node.close)
            node.spawn()
            made.append(node)
        for node in made:
            node.wait_until_ready()
        yield made[0], made[1]


def make_certificate(folder: Path, name: str, host: str) -> list[str]:
    """Of one authority for the folder; flags of the sidecar that shows it."""

    def openssl(*arguments: str) -> None:
        run("openssl", *arguments)

    def at(file: str) -> str:
        return str(folder / file)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if not (folder / "ca.pem").exists():
        openssl(
            "req", "-x509", *new_key, "-keyout", at("ca.key"), "-out", at("ca.pem"), "-days", "2", "-subj", "/CN=ca"
        )
    openssl("req", *new_key, "-keyout", at(f"{name}.key"), "-out", at(f"{name}.csr"), "-subj", f"/CN={name}")
    (folder / f"{name}.ext").write_text(f"subjectAltName=IP:{host}\n")
    signed = (
        "-CA",
        at("ca.pem"),
        "-CAkey",
        at("ca.key"),
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        at(f"{name}.ext"),
    )
    openssl("x509", "-req", "-in", at(f"{name}.csr"), *signed, "-out", at(f"{name}.pem"))
    files = {"cert": f"{name}.pem", "key": f"{name}.key", "client-ca": "ca.pem"}
    return [word for flag, file in files.items() for word in (f"--grpc-tls-{flag}", at(file))]


def _pipe(pipe: "IO[str] | None") -> "IO[str]":
    assert pipe is not None
    return pipe
