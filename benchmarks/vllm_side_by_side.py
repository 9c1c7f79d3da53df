"""One vLLM, several ways to keep its KV: none, its own offloading to host memory, that with files behind, its example
connector, and ours, as a connector and behind its offloading. Same machine, same model, same prompts.

    make vllm-test PYTEST_ARGS=--collect-only    # the environment, once
    .venv-vllm/bin/python -m benchmarks.vllm_side_by_side

Each way gets two processes, one after the other, over what it keeps outside of them. The first computes some documents with a
question each (cold), and after vLLM's own prefix cache was emptied the same documents with another question (warm); the
second process gets them with a third question (restarted), first one by one, then all at once. vLLM's native offloading refuses a
CPU; it runs here with its worker's copies by memcpy (tests/vllm/cpu_offload.py), the rest of it as it is.
"""

import importlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import Report, Row, machine_card, show
from benchmarks.sidecar import running_sidecar

QUESTION = "vLLM beside vLLM with a store: time to first token, throughput, memory"
ROOT = Path(__file__).parent.parent
SHIMS = ROOT / "tests" / "vllm"
BLOCK_TOKENS = 32
POOL_BYTES = 512 << 20
PROCESS_DEADLINE_S = 1200.0
NATIVE = {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_offload", "cpu_bytes_to_use": POOL_BYTES}


def connector(way: str, socket: Path, directory: Path) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config of each way."""
    tier = {"type": "KVStoreTier", "module_path": "kvstore.engine_connector.vllm_tier", "socket": str(socket)}
    files = {"type": "fs", "root_dir": str(directory / "fs"), "n_read_threads": 2, "n_write_threads": 2}
    ways: dict[str, dict[str, Any]] = {
        "example connector (files)": {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(directory / "example")},
        },
        "native offloading": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": NATIVE},
        "native offloading, files behind": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": NATIVE | {"secondary_tiers": [files]},
        },
        "native offloading, kvstore behind": {
            "kv_connector": "KVStoreOffloadingConnector",
            "kv_connector_module_path": "kvstore.engine_connector.vllm_tier",
            "kv_connector_extra_config": NATIVE | {"secondary_tiers": [tier]},
        },
        "kvstore": {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.engine_connector.vllm",
            "kv_connector_extra_config": {"socket": str(socket)},
        },
    }
    if way == "vLLM alone":
        return None
    return {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | ways[way]


WAYS = (
    "vLLM alone",
    "example connector (files)",
    "native offloading",
    "native offloading, files behind",
    "native offloading, kvstore behind",
    "kvstore",
)


def run(*, model: Path, documents: int, tokens: int, ways: tuple[str, ...] = WAYS) -> Report:
    """`model`: a Hugging Face directory."""
    rows: list[Row] = []
    answers: dict[str, list[Any]] = {}
    with running_sidecar(1 << 30) as socket:
        for way in ways:
            with tempfile.TemporaryDirectory(prefix="kvstore-bench-vllm-") as directory:
                order = {"model": str(model), "documents": documents, "tokens": tokens}
                order |= {"connector": connector(way, socket, Path(directory))}
                first = _in_process(order | {"rounds": ["cold", "warm"]})
                again = _in_process(order | {"rounds": ["restarted", "all at once"]})
                kept = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
            answers[way] = [first["answers"], again["answers"]]
            row: Row = {
                "way": way,
                "cold_ttft_s": round(statistics.median(first["ttft"]["cold"]), 2),
                "warm_ttft_s": round(statistics.median(first["ttft"]["warm"]), 3),
                "restarted_ttft_s": round(statistics.median(again["ttft"]["restarted"]), 3),
                "all_at_once_tokens_per_s": round(again["tokens_per_s"]),
                "peak_rss_mib": round(max(first["rss_mib"], again["rss_mib"])),
                "files_mib": round(kept / 2**20),
                "same_tokens": "yes" if answers[way] == answers[ways[0]] else "no",
            }
            rows.append(row)
            click.echo(json.dumps(row), err=True)  # the next way takes minutes
    return Report(
        question=QUESTION,
        command=f"python -m benchmarks.vllm_side_by_side --documents {documents} --tokens {tokens}",
        rows=rows,
        remarks=[
            f"median over {documents} documents of {tokens:,} tokens + {BLOCK_TOKENS} of question, one token of answer each",
            f"all_at_once: all documents together, {BLOCK_TOKENS} tokens of answer each; prompt and answer tokens count",
            "peak_rss_mib is vLLM's; the sidecar's 1 GiB of arena and the page cache of files are not in it",
            "same_tokens: all answers are those of the first way",
        ],
    )


def _in_process(order: dict[str, Any]) -> dict[str, Any]:
    """One vLLM from start to end, in a fork of this process, which has imported vLLM and no more: importing takes longer than
    all the rest."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="kvstore-bench-vllm-", suffix=".log") as log:
        child = fork.Process(target=_measure_into, args=(theirs, order, log.name))
        child.start()
        theirs.close()
        try:
            if not ours.poll(PROCESS_DEADLINE_S):
                raise click.ClickException(f"{order['connector']}: no answer in {PROCESS_DEADLINE_S:.0f} s")
            found: dict[str, Any] = ours.recv()
        except EOFError as err:
            raise click.ClickException(f"{order['connector']}: {Path(log.name).read_text()[-4000:]}") from err
        finally:
            child.join(30.0)
            child.kill()
    return found


def _measure_into(pipe: Connection, order: dict[str, Any], log: str) -> None:
    with Path(log).open("w") as file:
        for stream in (1, 2):  # vLLM says a lot
            os.dup2(file.fileno(), stream)
    pipe.send(measure(order))


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own."""
    from vllm import LLM, SamplingParams  # only where vLLM is
    from vllm.inputs import TokensPrompt

    sys.path += [str(SHIMS)]
    llm = LLM(
        order["model"],
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=2048,
        enforce_eager=True,
        kv_transfer_config=order["connector"],
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, parameters, use_tqdm=False)]

    texts = [
        [1000 + (7 * i * (d + 3) + i * i) % 40000 for i in range(order["tokens"])] for d in range(order["documents"])
    ]
    generate([[5000 + i for i in range(BLOCK_TOKENS)]], 2)  # whatever a first request costs
    ttft: dict[str, list[float]] = {}
    answers: list[Any] = []
    tokens_per_s = 0.0
    for number, name in enumerate(order["rounds"]):
        llm.reset_prefix_cache()
        asked = [text + [2000 + 31 * number + i for i in range(BLOCK_TOKENS)] for text in texts]
        if name == "all at once":
            started = time.perf_counter()
            answers.append(generate(asked, BLOCK_TOKENS))
            seconds = time.perf_counter() - started
            tokens_per_s = sum(len(prompt) + BLOCK_TOKENS for prompt in asked) / seconds
            continue
        for prompt in asked:
            started = time.perf_counter()
            answers.append(generate([prompt], 1))
            ttft.setdefault(name, []).append(time.perf_counter() - started)
            generate([[6000 + i for i in range(BLOCK_TOKENS)]], 2)  # some way save a step later
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ttft": ttft, "answers": answers, "tokens_per_s": tokens_per_s, "rss_mib": rss_mib}


@click.command(help=QUESTION)
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: SmolLM2, made once."
)
@click.option("--documents", default=4, show_default=True)
@click.option("--tokens", default=1500, show_default=True)
@click.option("--only", "ways", multiple=True, type=click.Choice(WAYS))
@click.option("--json", "as_json", is_flag=True)
def main(*, model: Path | None, documents: int, tokens: int, ways: tuple[str, ...], as_json: bool) -> None:
    """Start the processes."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "1",
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if model is None:
        model = ROOT / ".cache" / "vllm" / "smollm2"
        command = [sys.executable, SHIMS / "make_model.py", model]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    importlib.import_module("vllm").LLM  # noqa: B018 - imported when it is first asked for
    show(run(model=model, documents=documents, tokens=tokens, ways=ways or WAYS), machine_card(), as_json=as_json)


if __name__ == "__main__":
    main()
