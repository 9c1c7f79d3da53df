"""The comparison with transformers runs on a tiny model, and compares the same model. Its timings are not judged here."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "engine")]

from tiny_llama import dense_logits, random_prompt, random_tensors, write_gguf  # noqa: E402 (neither is installed)

from benchmarks import engine_speed  # noqa: E402
from benchmarks.reference_model import llama_of_gguf  # noqa: E402


@pytest.mark.e2e
def test_the_speed_benchmark_has_a_row_for_each_part_of_each_shape(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", random_tensors())
    shapes = [engine_speed.Shape(1, 20), engine_speed.Shape(3, 40)]

    report = engine_speed.run(model=model, shapes=shapes, rounds=2, threads=1)

    assert [(row["part"], row["batch"], row["n"]) for row in report.rows] == [
        ("prefill", 1, 2),
        ("decode", 1, 2),
        ("prefill", 3, 2),
        ("decode", 3, 2),
    ]
    assert all(row["engine_of_transformers_paired"] > 0 for row in report.rows)
    assert len(report.goals) == 2


def test_the_reference_model_is_that_of_the_file(tmp_path: Path) -> None:
    tensors = random_tensors()
    tokens = random_prompt(np.random.default_rng(3), 60)

    with torch.inference_mode():
        logits = llama_of_gguf(write_gguf(tmp_path / "tiny.gguf", tensors))(torch.tensor([tokens])).logits[0]

    assert np.abs(logits.numpy() - dense_logits(tensors, tokens, np.float32)).max() < 2e-3
