"""A real `kvstore engine serve` for tests, and what it takes to look at it from outside."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from sidecar_process import ROOT, read_line, wait_until

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
ANSWER_DEADLINE_S = 30.0
BLOCK = 4
NUM_PAGES = 256
MODEL = "tiny"
Figures = dict[str, float]


class ApiServerProcess:
    """Serves the model on any free port; its log lies beside the model."""

    def __init__(self, model: Path, name: str, *flags: str) -> None:
        self._command = [sys.executable, "-m", "kvstore.cli.main", "engine", "serve", str(model), "--port", "0"]
        self._command += ["--num-pages", str(NUM_PAGES), "--block-tokens", str(BLOCK), "--chunk-tokens", "32"]
        self._command += ["--num-threads", "1", "--served-model-name", MODEL, *flags]
        self._log = model.with_name(f"{name}.log")
        self._child: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> "ApiServerProcess":
        with self._log.open("w") as log:
            self._child = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        line = read_line(self._child, START_DEADLINE_S)
        assert line.startswith("kvstore engine ready url=http://127.0.0.1:"), line + self.log
        assert line.endswith(f"/v1 model={MODEL}"), line
        self.port = int(line.split("127.0.0.1:")[1].split("/")[0])
        return self

    def alive(self) -> bool:
        assert self._child is not None
        return self._child.poll() is None

    def terminate(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM; the exit status, which is not 0 when the engine lost a page. Idempotent."""
        assert self._child is not None
        if self._child.poll() is None:
            self.terminate()
        try:
            return self._child.wait(STOP_DEADLINE_S)
        finally:
            self._child.kill()
            assert self._child.stdout is not None
            self._child.stdout.close()

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_DEADLINE_S)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_DEADLINE_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()

    def figures(self) -> Figures:
        """Samples of /metrics by name and label values, as in `kvstore_engine_pages free`."""
        status, page = self.get("/metrics")
        assert status == 200
        return {
            " ".join((sample.name, *sample.labels.values())): sample.value
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
        }

    def is_idle(self) -> bool:
        """No request anywhere, every page free."""
        figures = self.figures()
        states = ("waiting", "loading", "running", "draining")
        busy = sum(figures[f"kvstore_engine_requests {state}"] for state in states)
        return busy == 0 and figures["kvstore_engine_pages free"] == NUM_PAGES

    def wait_until_idle(self) -> None:
        wait_until(self.is_idle, "no request, all pages free", ANSWER_DEADLINE_S)


@contextlib.contextmanager
def running_api_server(model: Path, name: str, *flags: str) -> Iterator[ApiServerProcess]:
    """Started, and stopped in order: with exit status 0, every page free, and no error in its log."""
    server = ApiServerProcess(model, name, *flags)
    try:
        yield server.start()
        assert server.stop() == 0, server.log
        assert "level=ERROR" not in server.log
        assert "Traceback" not in server.log
    finally:
        server.stop()
