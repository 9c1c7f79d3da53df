"""Text to token ids and back: byte-level BPE, chats through the model's template, streaming text.

Control tokens are recognised in the text of `encode`, as other engines do, but never in the content of a chat message:
a user who types <|im_end|> sends those ten characters, not the end of the turn.
"""

import codecs
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenizers import Tokenizer

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.chat_template import CHATML, ChatTemplate
from kvstore.engine_connector.engine.text_length import text_length

CheckLength = Callable[[int], None]
"""Told the fewest tokens that a text can have before it is encoded; raises to refuse it. A text of megabytes takes seconds."""

_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>")
"""Control tokens that end a turn in whatever model has them, also where its settings name only one of them."""


class BPETokenizer:
    """Encode and decode for one vocabulary. Thread-safe: nothing changes after construction.

    `pipeline` recognises control tokens. `bytes_of_id` has one entry for each id that the model can give, b"" for control
    tokens and for ids without a token. Without a `chat_template` a model that has ChatML's tokens chats in ChatML.
    """

    def __init__(
        self,
        pipeline: Tokenizer,
        bytes_of_id: Sequence[bytes],
        *,
        control: frozenset[str],
        eos_ids: Sequence[int],
        special_tokens: Mapping[str, str],
        chat_template: str,
    ) -> None:
        self._text = pipeline
        self._ordinary = Tokenizer.from_str(pipeline.to_str())
        self._ordinary.encode_special_tokens = True  # control tokens are characters like any others
        self._bytes = bytes_of_id
        self._length = text_length(pipeline, bytes_of_id)
        self._control = re.compile("|".join(re.escape(t) for t in sorted(control, key=len, reverse=True)) or r"(?!)")
        ends = [pipeline.token_to_id(token) for token in _STOP_TOKENS if token in control]
        self.stop_ids = frozenset({*eos_ids, *(index for index in ends if index is not None)})
        chatml = CHATML if {"<|im_start|>", "<|im_end|>"} <= control else ""
        self._chat = _compiled(chat_template or chatml, special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are 0 to vocab_size - 1."""
        return len(self._bytes)

    def encode(self, text: str, *, check_length: CheckLength | None = None) -> list[int]:
        """Token ids of `text`, control tokens recognised; the model's token for the beginning, if it has one, in front."""
        self._check_length([text], check_length)
        return _ids(self._text, text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, check_length: CheckLength | None = None
    ) -> list[int]:
        """The model's chat template over messages with `role` and `content`; ends where the assistant's answer begins.

        Raises ConfigError for malformed messages, for those that the template refuses, and for a model without one.
        """
        _check_messages(messages)
        if isinstance(self._chat, ConfigError):
            raise self._chat
        # Control tokens in what a message says are put out of the template's and the pipeline's sight, and come back as
        # characters. Nobody can guess the marks that stand for them.
        mark = secrets.token_hex(8)
        hidden: list[str] = []

        def hide(found: re.Match[str]) -> str:
            hidden.append(found[0])
            return f"[{mark}:{len(hidden) - 1}]"

        masked = [{key: self._control.sub(hide, value) for key, value in message.items()} for message in messages]
        text = self._chat.render(masked)
        pieces = re.split(rf"\[{mark}:(\d+)\]", text)  # text, number, text, number, ... text
        self._check_length(pieces[::2], check_length)
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            source, said = (self._ordinary, hidden[int(piece)]) if index % 2 else (self._text, piece)
            ids += _ids(source, said, add_special_tokens=False)
        return ids

    def _check_length(self, texts: Iterable[str], check: CheckLength | None) -> None:
        if check is not None:
            check(sum(map(self._length.least_tokens, texts)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; control tokens have none; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[token_id] for token_id in token_ids).decode(errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """What one token stands for; b"" for a control token."""
        return self._bytes[token_id]

    def name_of(self, token_id: int) -> str:
        """A token as the vocabulary writes it; "" for an id without one."""
        name: str | None = self._text.id_to_token(token_id)
        return name or ""

    def stream_decoder(self) -> "StreamDecoder":
        """A decoder for one sequence's tokens as they come."""
        return StreamDecoder(self._bytes)


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


def _ids(pipeline: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """A batch of one: `encode` would hold the GIL all the while, seconds for a text of megabytes."""
    (encoding,) = pipeline.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _compiled(template: str, special_tokens: Mapping[str, str]) -> ChatTemplate | ConfigError:
    """The template, or why this model cannot chat; it serves text in any case."""
    if not template:
        return ConfigError(
            "messages: this model has neither a chat template nor ChatML's tokens; give it text instead",
            field="messages",
            value="",
        )
    try:
        return ChatTemplate(template, special_tokens)
    except ConfigError as err:
        return err


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise ConfigError("messages: empty; give at least one message", field="messages", value=0)
    for message in messages:
        if message.keys() != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            raise ConfigError(
                f"messages: a message has keys {sorted(message)}; use role and content, both text",
                field="messages",
                value=str(sorted(message)),
            )


def token_bytes(token: str) -> bytes:
    """Bytes of a token written in GPT-2's byte alphabet; a character outside it stands for itself."""
    return b"".join(_BYTE_OF[c] if c in _BYTE_OF else c.encode() for c in token)


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's map (openai/gpt-2 encoder.py, bytes_to_unicode): printable Latin-1 is itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): bytes([b]) for b in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
