"""The demo's engines: started together, asked one at a time; the others wait on a pipe and use no CPU."""

from collections.abc import Mapping
from pathlib import Path

from kvstore.demo.document import QUESTION
from kvstore.demo.options import DemoOptions
from kvstore.demo.outcome import Answer
from kvstore.demo.processes import Engine
from kvstore.demo.progress import Progress

LOAD_DEADLINE_S = 180.0
"""Three engines that dequantise their weights at once on two cores need about 20 s."""

ANSWER_DEADLINE_S = 300.0
"""A prefill of the model's whole context takes a minute on two cores."""


class Engines:
    """All that were started, so that `close` ends them whatever happens."""

    def __init__(self, options: DemoOptions, logs: Path, progress: Progress) -> None:
        self._options = options
        self._logs = logs
        self._progress = progress
        self._started: list[Engine] = []

    def start(self, sockets: Mapping[str, Path | None], *, learn: bool = False) -> list[Engine]:
        """By name; each with the socket of its sidecar, None: without a store. Until all are loaded and warm. `learn`: and the
        sidecars know what computing costs them."""
        started = []
        for name, socket in sockets.items():
            log = self._logs / f"engine-{name}.log"
            engine = Engine(f"engine {name}", self._options.model, socket, log, learn=learn)
            self._started.append(engine)
            engine.start()
            started.append(engine)
        for engine in started:
            engine.wait_ready(LOAD_DEADLINE_S)
        return started

    def ask(
        self,
        engine: Engine,
        case: str,
        text: str,
        *,
        question: str = QUESTION,
        document: int = 0,
        prompt_tokens: int | None = None,
    ) -> Answer:
        """One request, shown as a step."""
        with self._progress.step(f"{case}: {text}") as step:
            answer = engine.ask(
                question=question,
                prompt_tokens=prompt_tokens or self._options.prompt_tokens,
                max_tokens=self._options.max_tokens,
                deadline_s=ANSWER_DEADLINE_S,
                document=document,
            )
            step.result = f"first token after {answer.ttft_s:.2f} s"
        return answer

    def close(self) -> None:
        """End them."""
        for engine in self._started:
            engine.stop()
