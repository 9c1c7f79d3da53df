"""No text has fewer tokens than its length says, and one that is too long by that alone is not encoded."""

import dataclasses
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import TOKENIZER, VOCABULARY
from tiny_llama import CONTROL, TOKENS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.gguf_tokenizer import gguf_tokenizer
from kvstore.engine_connector.engine.text_length import text_length
from kvstore.engine_connector.engine.tokenizer import token_bytes

COMPOSES = gguf_tokenizer(dataclasses.replace(VOCABULARY, pre_tokenizer="qwen2"))
LACKS = gguf_tokenizer(
    dataclasses.replace(VOCABULARY, tokens=[name if name != "\u0104" else "<no EOT>" for name in TOKENS])
)
TEXTS = st.text() | st.lists(st.sampled_from([*CONTROL, " the", "\u1fbe\u0308\u0301", "12", " ", "\x04"])).map("".join)


class TooLong(Exception):
    pass


def least_tokens(tokenizer, text: str) -> int:
    """What the check is told."""
    told: list[int] = []
    tokenizer.encode(text, check_length=told.append)
    (least,) = told
    return least


@pytest.mark.parametrize("tokenizer", [TOKENIZER, COMPOSES, LACKS], ids=["plain", "nfc", "lacks a byte"])
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(tokenizer, text):
    assert least_tokens(tokenizer, text) <= len(tokenizer.encode(text))


def test_the_bound_is_reached():
    text = CONTROL[0] * 50

    assert least_tokens(TOKENIZER, text) == len(TOKENIZER.encode(text)) == 50


def test_a_character_is_composed_of_at_most_four_times_its_bytes():
    """All that NFC can shrink: canonical equivalents of a character are no longer than the longest of each of its parts."""
    longest: dict[str, int] = {}
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    for char in points:
        parts = unicodedata.normalize("NFD", char)
        longest[parts] = max(longest.get(parts, 0), len(char.encode()))
    for char in points:
        parts = unicodedata.normalize("NFD", char)
        if unicodedata.normalize("NFC", char) == char and len(parts) > 1:
            assert sum(longest.get(part, len(part.encode())) for part in parts) <= 4 * len(char.encode()), hex(
                ord(char)
            )
        assert len(char.encode()) <= 4 * len(unicodedata.normalize("NFC", char).encode())


def test_a_text_too_long_is_refused_before_it_is_encoded(monkeypatch):
    def refuse(num_tokens: int) -> None:
        raise TooLong

    monkeypatch.setattr("kvstore.engine_connector.engine.tokenizer._ids", lambda *_, **__: pytest.fail("encoded"))
    for encode in (
        lambda: TOKENIZER.encode("the", check_length=refuse),
        lambda: TOKENIZER.encode_chat([{"role": "user", "content": "the"}], check_length=refuse),
    ):
        with pytest.raises(TooLong):
            encode()


def test_an_engine_names_the_least_number_and_its_limit(make_llm):
    llm = make_llm()

    with pytest.raises(
        ConfigError, match="prompt: a text of at least 1000 tokens; they are more than the 512 that"
    ) as caught:
        llm.add_request(CONTROL[0] * 1000)

    assert caught.value.fields["field"] == "prompt"


def pipeline(**parts: object) -> Tokenizer:
    """Of bytes alone, that drops nothing, but for what `parts` change."""
    vocabulary = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def most_bytes(made: Tokenizer) -> int:
    return text_length(made, [token_bytes(token) for token in made.get_vocab(with_added_tokens=False)]).most_bytes


def test_a_tokenizer_that_may_drop_text_has_no_bound():
    removes = pre_tokenizers.Split(Regex(" +"), behavior="removed")
    strips = pipeline()
    strips.add_tokens([AddedToken("<x>", lstrip=True)])

    assert most_bytes(pipeline()) == 1
    assert most_bytes(pipeline(normalizer=normalizers.NFC())) == 4
    assert most_bytes(pipeline(normalizer=normalizers.Replace("a", ""))) == 0
    assert most_bytes(pipeline(pre_tokenizer=pre_tokenizers.Sequence([removes, pre_tokenizers.ByteLevel()]))) == 0
    assert most_bytes(strips) == 0
    assert text_length(pipeline(), [b"a"]).most_bytes == 0


def test_bytes_that_the_vocabulary_lacks_count_nothing():
    assert LACKS.encode("\x04" * 9) == []
    assert least_tokens(LACKS, "\x04" * 9) == 0
    assert least_tokens(LACKS, "\x04" * 9 + CONTROL[0]) == 1
