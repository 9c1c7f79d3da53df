"""Stop strings: cut where the first one ends first, never shown in part, whatever the tokens' borders."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.output_text import OutputText
from kvstore.engine_connector.engine.sampler import SamplingParams

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


class Pieces:
    """A decoder whose token i is the i-th piece; `rest` is what an unfinished character leaves."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.rest


def expected_text(whole: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Character by character, with nothing clever: the text, and whether a stop string ended it."""
    for end in range(1, len(whole) + 1):
        ends_here = [text for text in stop if whole[:end].endswith(text)]
        if ends_here:
            return whole[: end - max(map(len, ends_here))], True
    return whole, False


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=8), rest=st.text("ab", max_size=2), stop=STOPS)
@example(pieces=["a", "b"], rest="", stop=("ab", "b"))
@example(pieces=["aab"], rest="", stop=("ab",))
@example(pieces=["ab", "a"], rest="b", stop=("abab",))
def test_the_text_ends_before_the_first_stop_string_whatever_the_tokens(pieces, rest, stop):
    text = OutputText(Pieces(pieces, rest), stop)
    final, stopped = expected_text("".join(pieces) + rest, stop)
    shown = ""
    for index in range(len(pieces)):
        text.push(index)
        shown += text.take()
        assert final.startswith(shown), "something was shown that has to be taken back"
        if text.stopped:
            break
    text.finish()
    shown += text.take()

    assert (shown, text.text, text.stopped) == (final, final, stopped)


def test_what_cannot_begin_a_stop_string_is_shown_at_once():
    text = OutputText(Pieces(["Hello", " wor", "ld\n", "\nUser:"]), ("\n\nUser",))

    shown = []
    for index in range(4):
        text.push(index)
        shown.append(text.take())

    assert shown == ["Hello", " wor", "ld", ""]
    assert text.stopped


def test_nothing_is_added_after_a_stop_string():
    text = OutputText(Pieces(["x.", "y"]), (".",))
    text.push(0)
    text.push(1)
    text.finish()

    assert text.text == "x"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stop": "text"}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 257,)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_a_parameter_out_of_range_is_named(change, field):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**change)

    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (("a", ""), "stop: '' has 0 characters; use texts of 1 to 256 characters"),
        (("x" * 257,), f"stop: '{'x' * 40}' has 257 characters; use texts of 1 to 256 characters"),
        ((5,), "stop: 5 is no text; use texts of 1 to 256 characters"),
        (("x",) * 17, "stop: 17 texts; use at most 16"),
    ],
)
def test_a_stop_string_that_cannot_be_is_shown(stop, says):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(stop=stop)

    assert caught.value.message == says
