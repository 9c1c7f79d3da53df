"""A sidecar and vLLM's OpenAI servers as processes. Every wait has a deadline, and shows the end of the log."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

START_DEADLINE_S = 600.0  # importing vLLM alone takes 8 s on a quiet machine, a minute on a busy one
ANSWER_DEADLINE_S = 300.0
LOG_DEADLINE_S = 60.0
BLOCK_TOKENS = 32
CONNECTOR = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.engine_connector.vllm"}
SLOW_CONNECTOR = CONNECTOR | {"kv_connector_module_path": "slow_connector"}

TIE_EPSILON = 0.02
"""Log probabilities of a step's two best tokens: nearer ones may change places with the height of a matrix product."""


class Answer(NamedTuple):
    """A greedy completion. `gaps[i]` is how far the two best tokens of step i lie apart, in log probability."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    ttft_s: float


def assert_same_tokens(answer: Answer, reference: Answer) -> None:
    """Equal, except from the first step on at which the reference's two best tokens are a tie. Up to there the gap between
    the two best must be equal too: a model that goes on with a list writes the same words on half a prompt of garbage."""
    for step, (token, expected) in enumerate(zip(answer.token_ids, reference.token_ids, strict=True)):
        assert abs(answer.gaps[step] - reference.gaps[step]) < TIE_EPSILON, (step, answer.gaps, reference.gaps)
        if token != expected:
            assert reference.gaps[step] < TIE_EPSILON, f"step {step}: {token} instead of {expected}"
            return


class Slow:
    """What slow_connector.py reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Servers import modules by name: this folder's, and the kvstore that the test runs with.
        path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {"PYTHONPATH": os.pathsep.join(path), "SLOW": str(directory)}

    @contextmanager
    def each(self, name: str, seconds: float) -> Iterator[Path]:
        """Slow down `loads` or `saves`; yields the file that appears when one has begun."""
        switch, started = self.directory / name, self.directory / f"{name}.started"
        started.unlink(missing_ok=True)
        switch.write_text(str(seconds))
        try:
            yield started
        finally:
            switch.unlink()


def eventually(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


class _Process:
    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._command = command
        self.log = log
        self._env = os.environ | env
        self._child: subprocess.Popen[bytes] | None = None

    def _start(self, *flags: str) -> None:
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [*self._command, *flags], stdout=log, stderr=log, env=self._env, process_group=0
            )

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def kill(self, signum: int = signal.SIGKILL, deadline_s: float = 20.0) -> None:
        """Signal the process, and kill what is left of its group when it has ended or the deadline is over."""
        if self._child is None:
            return
        self._child.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(deadline_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(deadline_s)
        self._child = None

    def wait_for_log(self, pattern: str, *, after: int = 0, deadline_s: float = LOG_DEADLINE_S) -> re.Match[str]:
        """The first match of `pattern` in the log, from character `after` on."""
        until = time.monotonic() + deadline_s
        while not (found := re.search(pattern, self.read_log()[after:])):
            assert self.running, f"ended early:\n{self.read_log()[-4000:]}"
            assert time.monotonic() < until, f"no {pattern!r} in the log:\n{self.read_log()[-4000:]}"
            time.sleep(0.05)
        return found

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")


class Sidecar(_Process):
    """`kvstore serve` with a gigabyte. Started again after a kill, it has nothing and another boot id."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.socket = directory / "kvstore.sock"
        command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--socket", str(self.socket), "--no-grpc"]
        super().__init__([*command, "--log-level", "debug", *flags], directory / "sidecar.log", {})

    def start(self, *, arena: str = "1GiB") -> None:
        self._start("--arena", arena)
        until = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            assert self.running, self.read_log()[-4000:]
            assert time.monotonic() < until, self.read_log()[-4000:]
            time.sleep(0.05)

    def pause(self) -> None:
        """Hang: connections stay, nothing is answered."""
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0


class VllmServer(_Process):
    """One OpenAI server in float32 on the CPU. `store`: the sidecar's socket; None serves without a connector."""

    def __init__(
        self,
        name: str,
        model: Path,
        directory: Path,
        *,
        store: Path | None = None,
        connector: Mapping[str, object] = CONNECTOR,
        extra: Mapping[str, object] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._port = _free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "model", "--port", str(self._port), "--host", "127.0.0.1"]
        command += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--enforce-eager"]
        if "--dtype" not in args:
            command += ["--dtype", "float32"]
        if store is not None:
            transfer = {
                **connector,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": str(store), **(extra or {})},
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        quiet = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "1",
            "OMP_WAIT_POLICY": "passive",  # busy threads of two servers on two cores make every timing useless
            "KMP_BLOCKTIME": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        super().__init__([*command, *args], directory / f"{name}.log", quiet | dict(env or {}))

    def start(self) -> None:
        self._start()
        until = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self._get("/health")
            except urllib.error.URLError:
                assert self.running, f"ended early:\n{self.read_log()[-6000:]}"
                assert time.monotonic() < until, self.read_log()[-6000:]
                time.sleep(0.2)
            else:
                return

    def stop(self) -> None:
        self.kill(signal.SIGTERM)

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        model: str = "model",
        headers: Mapping[str, str] | None = None,
        **extra: object,
    ) -> Answer:
        """Greedy tokens, streamed. `extra`: more of the request's body."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "stream": True,
            **extra,
        }
        token_ids: list[int] = []
        gaps: list[float] = []
        started_s = time.monotonic()
        ttft_s = 0.0
        with self._open("/v1/completions", body, headers) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                assert choice["finish_reason"] in (None, "length"), choice
                ttft_s = ttft_s or time.monotonic() - started_s
                token_ids += [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
                best = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
                gaps += [high - low for low, high in best]
        assert len(token_ids) == len(gaps) == max_tokens
        return Answer(tuple(token_ids), tuple(gaps), ttft_s)

    def start_and_hang_up(self, prompt: Sequence[int], until: Callable[[], bool]) -> None:
        """Ask for a completion and close the connection once `until` is true: vLLM aborts the request."""
        body = json.dumps({"model": "model", "prompt": list(prompt), "max_tokens": 16, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            eventually(until)

    def forget_local_prefixes(self, *, reset_external: bool = False) -> None:
        """Empty vLLM's own prefix cache; with `reset_external` the connector is told too."""
        self._open(f"/reset_prefix_cache?reset_external={str(reset_external).lower()}", {}).close()

    def metric(self, name: str) -> float:
        """Sum over the labels of one of vLLM's counters."""
        lines = self._get("/metrics").decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    @property
    def external_hits(self) -> float:
        """Tokens that came from the connector, by vLLM's own count."""
        return self.metric("vllm:external_prefix_cache_hits_total")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as reply:
            content: bytes = reply.read()
            return content

    def _open(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> "urllib.request._UrlopenRet":
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        return urllib.request.urlopen(request, timeout=ANSWER_DEADLINE_S)


@contextmanager
def slowed_server(
    name: str,
    model: Path,
    directory: Path,
    sidecar: Sidecar,
    slow: Slow,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """One that loads whatever is found, since so small a model computes sooner than it fetches slowly. Starts the sidecar."""
    sidecar.start()
    server = VllmServer(
        name,
        model,
        directory,
        store=sidecar.socket,
        connector=SLOW_CONNECTOR,
        extra={"fetch": "always"},
        args=args,
        env=slow.env | dict(env or {}),
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()


def answers_alone(model: Path, directory: Path, prompts: Sequence[Sequence[int]], args: Sequence[str]) -> list[Answer]:
    """Of vLLM without a connector."""
    alone = VllmServer("alone", model, directory, args=args)
    try:
        alone.start()
        return [alone.complete(prompt) for prompt in prompts]
    finally:
        alone.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
