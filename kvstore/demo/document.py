"""Long real documents: chapters of the Python language reference, as every Python carries them for `help()`."""

from pydoc_data.topics import topics

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.tokenizer import BPETokenizer

_CHAPTERS = ("execmodel", "compound", "types", "specialnames")
"""Together several times the included model's context, so that any prompt that fits can be cut from them."""

QUESTION = "In one sentence, what is a code block in a Python program?"
OTHER_QUESTION = "In one sentence, how are names resolved in Python?"

WARM_UP = "The quick brown fox jumps."
"""Shorter than a block, so that it leaves nothing in a pool or in the store."""


def document_prompt(tokenizer: BPETokenizer, question: str, prompt_tokens: int, document: int = 0) -> list[int]:
    """Token ids of a chat that shows the beginning of a document and asks `question`: exactly `prompt_tokens` of them.

    The document comes first, so that all questions about it share its prefix. Document n begins with chapter n; documents
    have nothing but the chat's opening in common.
    """
    chapters = _CHAPTERS[document:] + _CHAPTERS[:document]
    head, tail = _around_document(tokenizer, question)
    room = prompt_tokens - len(head) - len(tail)
    text = tokenizer.encode("\n\n".join(str(topics[name]) for name in chapters))
    if not 0 < room <= len(text):
        low, high = len(head) + len(tail) + 1, len(head) + len(tail) + len(text)
        raise ConfigError(
            f"prompt_tokens: {prompt_tokens} is out of range; the document allows {low} to {high}",
            field="prompt_tokens",
            value=prompt_tokens,
        )
    return [*head, *text[:room], *tail]


def _around_document(tokenizer: BPETokenizer, question: str) -> tuple[list[int], list[int]]:
    """The chat's tokens before the document and after it."""
    mark = "\x00"  # no text holds it
    chat = tokenizer.encode_chat([{"role": "user", "content": f"{mark}\n\n{question}"}])
    (mark_id,) = tokenizer.encode(mark)
    at = chat.index(mark_id)
    return chat[:at], chat[at + 1 :]
