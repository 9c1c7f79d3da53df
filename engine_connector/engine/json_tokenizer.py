"""The tokenizer out of a directory's tokenizer.json, with the chat template that lies beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from kvstore.engine_connector.engine.refusal import refuse
from kvstore.engine_connector.engine.tokenizer import BPETokenizer, token_bytes

_TEMPLATE_FILE = "chat_template.jinja"


def json_tokenizer(path: Path, about: Mapping[str, Any], *, vocab_size: int, eos_ids: Sequence[int]) -> BPETokenizer:
    """`about` is tokenizer_config.json. Raises ConfigError when it is no byte-level BPE, or more than the model has."""
    file = path / "tokenizer.json"
    if not file.is_file():
        refuse(path, "tokenizer.json is missing")
    try:
        pipeline = Tokenizer.from_file(str(file))
    except Exception as err:  # noqa: BLE001 (what the library raises, and no narrower)
        refuse(path, f"tokenizer.json: {err}", err)
    if not isinstance(pipeline.model, models.BPE) or not isinstance(pipeline.decoder, decoders.ByteLevel):
        found = f"{type(pipeline.model).__name__} with decoder {type(pipeline.decoder).__name__}"
        refuse(path, f"tokenizer.json is {found}; byte-level BPE is supported")
    pipeline.no_truncation()
    pipeline.no_padding()
    added = pipeline.get_added_tokens_decoder()
    bytes_of_id = [b""] * vocab_size
    for token, index in pipeline.get_vocab(with_added_tokens=True).items():
        if index >= vocab_size:
            refuse(path, f"token {token!r} has id {index}, the model has {vocab_size}")
        bytes_of_id[index] = token.encode() if index in added else token_bytes(token)
    special = {index: token.content for index, token in added.items() if token.special}
    for index in special:
        bytes_of_id[index] = b""
    ends = [index for index, token in special.items() if token == _text_of(about.get("eos_token"))]
    if not (stops := [*eos_ids, *ends]):
        refuse(path, "no eos_token_id in config.json or generation_config.json, no eos_token in tokenizer_config.json")
    if (after := pipeline.encode("a").ids[-1:]) and after[0] in stops:
        refuse(path, "tokenizer.json puts an end-of-text token after a prompt; a prompt without one is supported")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return BPETokenizer(
        pipeline,
        bytes_of_id,
        control=frozenset(special.values()),
        eos_ids=stops,
        special_tokens={name: text for name in names if (text := _text_of(about.get(name)))},
        chat_template=_chat_template(path, about),
    )


def _text_of(token: object) -> str:
    """A token is text, or an object with its text as `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _chat_template(path: Path, about: Mapping[str, Any]) -> str:
    """A file of its own, or a setting: one template, or several with names, of which `default` is the one for chats."""
    if (path / _TEMPLATE_FILE).is_file():
        return (path / _TEMPLATE_FILE).read_text()
    template = about.get("chat_template") or ""
    if isinstance(template, list):
        template = {named.get("name"): named.get("template") for named in template}.get("default") or ""
    if not isinstance(template, str):
        refuse(path, f"chat_template in tokenizer_config.json is {type(template).__name__}, not text")
    return template
