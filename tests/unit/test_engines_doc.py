"""docs/engines.md says what the code says: its messages, word for word, and commands that our own checks take."""

import ast
import json
import re
from pathlib import Path

import pytest

from kvstore.engine_connector.sglang_identity import BackendSettings
from kvstore.engine_connector.vllm_identity import ConnectorSettings

ROOT = Path(__file__).parent.parent.parent
DOC = (ROOT / "docs" / "engines.md").read_text()
POPPED_BY_SGLANG = {"hicache_storage_pass_prefix_keys", "tp_lcm_size", "prefetch_threshold"}


def messages() -> list[str]:
    """The second column of the table."""
    rows = [line.split(" | ") for line in DOC.partition("## When something is wrong")[2].splitlines() if " | " in line]
    return [row[1].strip("`") for row in rows[2:] if row[1].startswith("`")]


def texts_of_code() -> str:
    """Every string of the code, a line each, with `...` for what is put in."""
    found = []
    for path in (*(ROOT / "kvstore").rglob("*.py"), *(ROOT / "engine_connector").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd]", "...", node.value))
    return "\n".join(found)


TEXTS = texts_of_code()


@pytest.mark.parametrize("message", messages())
def test_a_message_stands_in_the_code(message: str) -> None:
    pattern = ".*".join(re.escape(part) for part in message.split("..."))

    assert re.search(pattern, TEXTS), message


def test_the_table_is_read_at_all() -> None:
    assert len(messages()) > 20


def test_the_settings_of_the_commands_are_known() -> None:
    configs = [json.loads(text) for text in re.findall(r"'(\{.*?\})'", DOC, re.DOTALL)]
    vllm, tier, sglang = configs

    assert ConnectorSettings.from_extra_config(vllm["kv_connector_extra_config"])
    assert vllm["kv_load_failure_policy"] == "recompute"
    assert BackendSettings.from_extra_config({k: v for k, v in sglang.items() if k not in POPPED_BY_SGLANG})
    for config in (vllm, tier, sglang, tier["kv_connector_extra_config"]["secondary_tiers"][0]):
        module = config.get("kv_connector_module_path") or config["module_path"]
        name = config.get("kv_connector") or config.get("class_name") or config["type"]
        source = (ROOT / "engine_connector" / f"{module.rpartition('.')[2]}.py").read_text()
        assert f"class {name}(" in source
