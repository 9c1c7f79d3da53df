"""The tokenizer out of a GGUF file's tables: byte-level BPE with one of the known ways to cut text into words."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.tokenizer import BPETokenizer, token_bytes

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer's tables as the file has them."""

    model: str  # tokenizer.ggml.model: gpt2 = byte-level BPE
    pre_tokenizer: str  # tokenizer.ggml.pre
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    eos_token_id: int
    bos_token_id: int = -1  # -1: none
    adds_bos: bool = False
    adds_eos: bool = False
    chat_template: str = ""


class _Words(NamedTuple):
    """How a family cuts text into the words within which merges apply."""

    pattern: str  # "": GPT-2's, as ByteLevel has it built in
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False  # a word that is a token is taken whole, whatever its merges


def _letters_and_digits(digits: str) -> str:
    """Llama 3's pattern and Qwen2's, which differ in how many digits make a word."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_KNOWN_WORDS: Mapping[str, _Words] = MappingProxyType(
    {
        "gpt-2": _Words(""),
        "smollm": _Words("", single_digits=True),
        "qwen2": _Words(_letters_and_digits(r"\p{N}"), nfc=True),
        "llama-bpe": _Words(_letters_and_digits(r"\p{N}{1,3}"), whole_words_first=True),
    }
)


def gguf_tokenizer(vocabulary: Vocabulary) -> BPETokenizer:
    """Raises ConfigError naming the key for a tokenizer that we would get wrong."""
    if vocabulary.model != "gpt2":
        _refuse("tokenizer.ggml.model", vocabulary.model, f"model {vocabulary.model!r}; byte-level BPE ('gpt2') is")
    if vocabulary.pre_tokenizer not in _KNOWN_WORDS:
        known = ", ".join(map(repr, _KNOWN_WORDS))
        _refuse(
            "tokenizer.ggml.pre", vocabulary.pre_tokenizer, f"pre-tokenizer {vocabulary.pre_tokenizer!r}; {known} are"
        )
    if vocabulary.adds_eos:
        _refuse("tokenizer.ggml.add_eos_token", "true", "a token after the end of the text; a prompt without one is")
    typed = list(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    control = [token for token, kind in typed if kind == _CONTROL]
    added = [token for token, kind in typed if kind == _USER_DEFINED]
    pipeline = _pipeline(vocabulary, control, added)
    special = {"eos_token": vocabulary.tokens[vocabulary.eos_token_id]}
    if vocabulary.bos_token_id >= 0:
        special["bos_token"] = vocabulary.tokens[vocabulary.bos_token_id]
    return BPETokenizer(
        pipeline,
        [_bytes_of(token, kind) for token, kind in typed],
        control=frozenset(control),
        eos_ids=[vocabulary.eos_token_id],
        special_tokens=special,
        chat_template=vocabulary.chat_template,
    )


def _pipeline(vocabulary: Vocabulary, control: list[str], added: list[str]) -> Tokenizer:
    words = _KNOWN_WORDS[vocabulary.pre_tokenizer]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    try:
        pipeline = Tokenizer(models.BPE(ids, merges, ignore_merges=words.whole_words_first))
    except Exception as err:  # what the library raises, and no narrower
        raise ConfigError(f"tokenizer: {err}", field="tokenizer.ggml.merges", value=len(merges)) from err
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words.pattern)
    steps: list[pre_tokenizers.PreTokenizer] = [byte_level]
    if words.pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    if words.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(steps)
    pipeline.decoder = decoders.ByteLevel()
    if words.nfc:
        pipeline.normalizer = normalizers.NFC()
    if vocabulary.adds_bos:
        bos = vocabulary.tokens[vocabulary.bos_token_id]
        pipeline.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary.bos_token_id)]
        )
    pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    pipeline.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return pipeline


def _bytes_of(token: str, kind: int) -> bytes:
    """A user-defined token is written as plain text, the others in GPT-2's byte alphabet; control tokens have no text."""
    if kind == _CONTROL:
        return b""
    return token.encode() if kind == _USER_DEFINED else token_bytes(token)


def _refuse(key: str, value: str, unsupported: str) -> None:
    raise ConfigError(f"tokenizer: {key} asks for {unsupported} supported", field=key, value=value)
