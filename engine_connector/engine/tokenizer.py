"""Text to token ids and back: byte-level BPE from the model file's own tables, ChatML messages, streaming text.

Control tokens are recognised in the text of `encode`, as other engines do, but never in the content of a chat message:
a user who types <|im_end|> sends those ten characters, not the end of the turn.
"""

import codecs
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.loader import Vocabulary

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What SmolLM2's template puts first when a chat has no system message."""

_CONTROL = 3  # tokenizer.ggml.token_type
_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


class BPETokenizer:
    """Encode and decode for one vocabulary. Thread-safe: nothing changes after construction."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.model != "gpt2":
            raise ConfigError(
                f"tokenizer: model {vocabulary.model!r} is not supported; byte-level BPE ('gpt2') is",
                field="tokenizer.ggml.model",
                value=vocabulary.model,
            )
        control = [t for t, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True) if kind == _CONTROL]
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens)}
        self._text = _build(vocabulary, self._ids, control)  # recognises control tokens
        self._ordinary = _build(vocabulary, self._ids, [])
        self._bytes = [b"" if token in set(control) else _token_bytes(token) for token in vocabulary.tokens]
        self.stop_ids = frozenset({vocabulary.eos_token_id} | {self._ids[t] for t in _STOP_TOKENS if t in self._ids})

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are 0 to vocab_size - 1."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, control tokens recognised; nothing is put in front."""
        ids: list[int] = self._text.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """ChatML: each message a dict with `role` and `content`; ends where the assistant's answer begins."""
        if not messages:
            raise ConfigError("messages: empty; give at least one message", field="messages", value=0)
        if messages[0].get("role") != "system":
            messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
        ids: list[int] = []
        for message in messages:
            if message.keys() != {"role", "content"}:
                raise ConfigError(
                    f"messages: a message has keys {sorted(message)}; use role and content",
                    field="messages",
                    value=str(sorted(message)),
                )
            ids += [self._control("<|im_start|>"), *self._plain(f"{message['role']}\n{message['content']}")]
            ids += [self._control("<|im_end|>"), *self._plain("\n")]
        return [*ids, self._control("<|im_start|>"), *self._plain("assistant\n")]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; control tokens have none; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[token_id] for token_id in token_ids).decode(errors="replace")

    def stream_decoder(self) -> "StreamDecoder":
        """A decoder for one sequence's tokens as they come."""
        return StreamDecoder(self._bytes)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._ordinary.encode(text, add_special_tokens=False).ids
        return ids

    def _control(self, token: str) -> int:
        if token not in self._ids:
            raise ConfigError(f"tokenizer: no {token} token; this model has no ChatML", field="messages", value=token)
        return self._ids[token]


class StreamDecoder:
    """Text of one sequence as its tokens come: a character appears once all of its bytes are there."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none inside an emoji."""
        return self._utf8.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character. All pieces together equal `decode` of all tokens."""
        return self._utf8.decode(b"", final=True)


def _build(vocabulary: Vocabulary, ids: dict[str, int], control: list[str]) -> Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    try:
        tokenizer = Tokenizer(models.BPE(ids, merges))
    except Exception as err:
        raise ConfigError(f"tokenizer: {err}", field="tokenizer.ggml.merges", value=len(merges)) from err
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary.pre_tokenizer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gpt-2":
        return byte_level
    raise ConfigError(
        f"tokenizer: pre-tokenizer {name!r} is not supported; 'smollm' and 'gpt-2' are",
        field="tokenizer.ggml.pre",
        value=name,
    )


def _token_bytes(token: str) -> bytes:
    """Bytes of a token written in GPT-2's byte alphabet; a character outside it stands for itself."""
    return b"".join(_BYTE_OF[c] if c in _BYTE_OF else c.encode() for c in token)


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's map (openai/gpt-2 encoder.py, bytes_to_unicode): printable Latin-1 is itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): bytes([b]) for b in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
