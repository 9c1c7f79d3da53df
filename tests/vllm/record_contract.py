"""What vLLM asks of a connector, written down for the tests that run without vLLM: the signatures of its classes, and every call
that it made of ours in a run with a store, a load, and a load that failed.

    OMP_WAIT_POLICY=passive python tests/vllm/record_contract.py [tests/data/vllm_contract.json]
"""

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

CLASSES = (
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorWorkerMetadata"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorStats"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorPromMetrics"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", "OffloadingConnector"),
    ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager"),
)
PROMPT = [11 + i * i % 7919 for i in range(330)]
BLOCK_TOKENS, NUM_OUTPUT = 32, 8


def signatures() -> dict[str, Any]:
    """Of the installed vLLM: for each class what must be overridden, and the parameters of each public method."""
    import vllm

    recorded = {}
    for module, name in CLASSES:
        cls = getattr(import_module(module), name)
        methods = {
            attribute: [[p.name, p.kind.name, p.default is not p.empty] for p in _signature(cls, attribute)]
            for attribute in sorted(dir(cls))
            if (attribute == "__init__" or not attribute.startswith("_")) and _function(cls, attribute) is not None
        }
        recorded[name] = {
            "module": module,
            "abstract": sorted(getattr(cls, "__abstractmethods__", ())),
            "methods": methods,
        }
    return {"version": vllm.__version__, "classes": recorded}


def _function(cls: type, attribute: str) -> Any:
    found = inspect.getattr_static(cls, attribute)
    found = getattr(found, "__func__", found)  # of a class or static method
    return found if inspect.isfunction(found) else None


def _signature(cls: type, attribute: str) -> Iterable[inspect.Parameter]:
    return inspect.signature(_function(cls, attribute)).parameters.values()


def calls(directory: Path) -> list[dict[str, Any]]:
    """Every call of our connector, in order, of an engine that runs scheduler and worker in this process."""
    import recording_connector
    from make_model import make_random_model
    from servers import Sidecar
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    sidecar = Sidecar(directory)
    sidecar.start()
    try:
        llm = LLM(
            str(make_random_model(directory / "model")),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=512,
            enforce_eager=True,
            max_num_batched_tokens=256,
            kv_transfer_config={
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "recording_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": str(sidecar.socket), "fetch": "always"},
            },
        )

        def generate(prompt: Sequence[int]) -> list[int]:
            parameters = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
            (output,) = llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], parameters, use_tqdm=False)
            return list(output.outputs[0].token_ids)

        stored = generate(PROMPT)
        llm.reset_prefix_cache()
        assert generate(PROMPT) == stored
        llm.reset_prefix_cache()
        recording_connector.fail_loads()
        assert generate(PROMPT) == stored
        recorded: list[dict[str, Any]] = recording_connector.CALLS
        return recorded
    finally:
        sidecar.kill()


def main() -> None:
    """Write the file."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/vllm_contract.json")
    with tempfile.TemporaryDirectory(prefix="kvstore-vllm-") as directory:
        recorded = signatures() | {"calls": calls(Path(directory))}
    layers = [call for call in recorded["calls"] if call["name"] in ("wait_for_layer_load", "save_kv_layer")]
    for call in layers[2:]:  # all alike
        recorded["calls"].remove(call)
    lines = [json.dumps(call, sort_keys=True) for call in recorded.pop("calls")]
    head = json.dumps(recorded, sort_keys=True, indent=1)
    target.write_text(f'{head[:-2]},\n "calls": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    main()
