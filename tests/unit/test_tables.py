"""The tables of models and hardware: every row is readable, agrees with its own shape, and is found by what people call it."""

import tomllib
from pathlib import Path

import pytest

from kvstore.calculator.prefill_shape import check_row, shape_of_row
from kvstore.core.errors import ConfigError
from kvstore.tables import rows

ROOT = Path(__file__).parent.parent.parent


def test_every_row_is_there() -> None:
    assert len(rows.models()) == 37
    assert len(rows.gpus()) == 20
    assert len(rows.efficiencies()) == 14
    assert rows.devices()["100 GbE/EDR RDMA"].bytes_per_s == 11.5e9


def test_tables_are_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert "*.csv" in project["tool"]["setuptools"]["package-data"]["*"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("llama-3.1-8b", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("QwQ-32B", "Qwen2.5-32B"),
        ("LLaMA3-70B(dummy)", "Llama-3.1-70B"),
        ("DeepSeek-R1-AWQ", "DeepSeek-R1"),
        ("deepseek_v3", "DeepSeek-V3"),
    ],
)
def test_a_model_is_found_by_other_names(asked: str, found: str) -> None:
    assert rows.model(asked).name == found


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("H100", "H100 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("A800", "A100-80 SXM"),
        ("A100-80-SXM", "A100-80 SXM"),
        ("H20-3e", "H20"),
        ("H200-SXM", "H200 SXM"),
    ],
)
def test_a_gpu_is_found_by_other_names(asked: str, found: str) -> None:
    assert rows.gpu(asked).name == found


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--model: 'Lama-3\.1-8b' is not known; .*Llama-3\.1-8B") as caught:
        rows.model("Lama-3.1-8b")

    assert caught.value.fields == {"field": "--model", "value": "Lama-3.1-8b"}
    with pytest.raises(ConfigError, match=r"--gpu: 'H10' .*H100"):
        rows.gpu("H10")


def test_only_the_two_rows_with_a_reason_contradict_their_shape() -> None:
    wrong = {name: check_row(row) for name, row in rows.models().items() if check_row(row)}

    assert set(wrong) == {"Gemma-3-4B", "DeepSeek-V3.2"}, "a vision tower; an indexer beside the latent"
    assert "3.88 B by its shape" in wrong["Gemma-3-4B"][0]
    assert "indexer" in wrong["DeepSeek-V3.2"][0]


def test_a_row_of_another_model_is_noticed() -> None:
    row = rows.model("GLM-4.5")

    wrong = check_row(row._replace(kv_bytes_per_token=70272, check_params=100e9))

    assert len(wrong) == 2
    assert "376,832 B by its layers and heads" in wrong[0]
    assert "100.00 B by its shape" in wrong[1]


def test_every_model_has_a_shape_to_calculate_with() -> None:
    for row in rows.models().values():
        shape = shape_of_row(row)

        assert shape.prefill_params > 0, row.name
        assert shape.attn_flops_per_pair + shape.window_flops_per_pair > 0, row.name
        assert bool(shape.window_tokens) == (shape.window_flops_per_pair > 0), row.name


@pytest.mark.parametrize(("name", "dense"), [("Llama-3.1-8B", True), ("Mixtral-8x7B", False), ("DeepSeek-V3", False)])
def test_dense_models_are_told_from_others(name: str, dense: bool) -> None:
    assert shape_of_row(rows.model(name)).is_dense is dense


@pytest.mark.parametrize(
    ("text", "rate"),
    [("44-51 H2D DMA (2 MB)", 47.5), ("~24-27", 25.5), ("0.762", 0.762), ("~59 derived", 59.0), ("", 0.0)],
)
def test_a_rate_is_read_from_words(text: str, rate: float) -> None:
    assert rows.first_rate(text) == rate
