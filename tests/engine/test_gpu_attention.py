"""The engine on a GPU, as far as one can tell without: its attention in Triton's interpreter, its model on no device."""

import subprocess
import sys
from pathlib import Path

import torch

from kvstore.engine_connector.engine.loader import load_model
from kvstore.engine_connector.engine.model import Transformer


def test_the_engine_answers_as_on_the_cpu(interpreter_env):
    program = Path(__file__).parent / "gpu_attention_program.py"

    done = subprocess.run(
        [sys.executable, str(program)], env=interpreter_env, capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("same tokens")


def test_a_model_computes_where_its_weights_are(tiny):
    """On a device without memory, where torch only follows shapes and refuses to mix devices."""
    loaded, device = load_model(tiny.path), torch.device("meta")
    weights = loaded.weights.to(device)
    tokens = torch.zeros(16, dtype=torch.long, device=device)
    layers = []

    def attention(layer, q, k, v):
        layers.append(layer)
        assert {x.device for x in (q, k, v)} == {device}
        return q.reshape(q.shape[0], -1)

    model = Transformer(loaded.config, weights)
    logits = model.logits(model.hidden(tokens, tokens, attention))

    assert layers == list(range(loaded.config.num_layers))
    assert logits.device == device
    assert {x.device for x in (weights.embedding, weights.norm, weights.layers[0].down)} == {device}
    assert loaded.weights.embedding.device.type == "cpu"
