"""The engine on its GPU attention, in Triton's interpreter: prints whether it answers as on torch's.

TRITON_INTERPRET=1 python gpu_attention_program.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent.parent))

from tiny_llama import random_prompt, random_tensors, same_tokens, write_gguf

from kvstore.engine_connector.engine import runner
from kvstore.engine_connector.engine.gpu_attention import GpuDecodeBatch, GpuPrefillChunk
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.outputs import RequestOutput
from kvstore.engine_connector.engine.sampler import SamplingParams


def answers(model: Path) -> list[RequestOutput]:
    """Of chunks that begin within pages, beside decodes, with a prefix in common."""
    rng = np.random.default_rng(5)
    first = random_prompt(rng, 45)
    prompts = [first, [*first[:22], *random_prompt(rng, 9)], random_prompt(rng, 3)]
    with LLM(model, num_pages=64, block_tokens=4, chunk_tokens=16, num_threads=1) as llm:
        llm.generate([first[:24]], SamplingParams(max_tokens=1))
        return llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_gguf(Path(folder) / "tiny.gguf", random_tensors())
        expected = answers(model)
        runner.prefill_chunk, runner.decode_batch = GpuPrefillChunk, GpuDecodeBatch
        compared = [same_tokens(*pair) for pair in zip(expected, answers(model), strict=True)]
    assert sum(compared) >= 10, compared
    print("same tokens", sum(compared))


if __name__ == "__main__":
    main()
