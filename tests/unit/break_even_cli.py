"""Runs `kvstore break-even` in this process, as the console script would."""

import json
from typing import Any, NamedTuple

import pytest

from kvstore.cli.main import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        return found


class BreakEven:
    """`run("speculative", "--acceptance", 0.8)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr("sys.argv", ["kvstore", "break-even", *map(str, arguments)])
        self._capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as err:
            code = err.code if isinstance(err.code, int) else 1
        out, err_text = self._capsys.readouterr()
        assert "Traceback" not in err_text
        return Ran(code, out, err_text)

    def json(self, *arguments: object) -> dict[str, Any]:
        ran = self.run(*arguments, "--json")
        assert ran.code == 0, ran.err
        return ran.json

    def refusal(self, *arguments: object) -> str:
        """The one line that says what is wrong."""
        ran = self.run(*arguments)
        assert ran.code == 2, ran.out
        assert ran.out == ""
        return ran.err.strip().splitlines()[-1]
