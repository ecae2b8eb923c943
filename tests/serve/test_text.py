"""Tokens to text: whatever the tokens, nothing broken and no part of a stop string is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier_client.serve.text import Text, token_bytes
from tests.serve.tokens import END, START, fallback_tokenizer, tokenizer


def shown(tokens: list[int], stops: tuple[str, ...] = (), prompt: bytes = b"") -> tuple[list[str], Text[int]]:
    """What is shown after each token, and at the end."""
    text: Text[int] = Text(tokenizer(), list(prompt), stops, frozenset([END]))
    pieces = []
    for number, token in enumerate(tokens):
        text.add(token, number)
        pieces.append(text.take().text)
        if text.stopped:
            break
    pieces.append(text.take(all_of_it=True).text)
    return pieces, text


def test_characters_come_whole() -> None:
    pieces, _ = shown(list("né🙂".encode()))
    assert pieces == ["n", "", "é", "", "", "", "🙂", ""]


def test_a_character_that_never_completes_is_not_shown() -> None:
    pieces, _ = shown(list("ab🙂".encode()[:-1]))
    assert "".join(pieces) == "ab"


def test_a_character_begun_in_the_prompt_does_not_leak_it() -> None:
    pieces, _ = shown(list(b"ok"), prompt=b"secret " + "🙂".encode()[:2])
    assert "secret" not in "".join(pieces) and "".join(pieces).endswith("ok")


def test_special_tokens_and_those_that_end_have_no_text() -> None:
    pieces, _ = shown([ord("a"), START, ord("b"), END])
    assert "".join(pieces) == "ab"


def test_a_stop_string_across_tokens_is_held_and_never_shown() -> None:
    pieces, text = shown(list(b"one\nUser: two"), ("\nUser:",))
    assert pieces == ["o", "n", "e", *[""] * 7]
    assert text.stopped


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    pieces, text = shown(list(b"ab\nUs!"), ("\nUser:",))
    assert pieces == ["a", "b", "", "", "", "\nUs!", ""]
    assert not text.stopped
    pieces, _ = shown(list(b"ab\nUs"), ("\nUser:",))
    assert pieces[-1] == "\nUs"


def test_items_come_with_their_text() -> None:
    text: Text[str] = Text(tokenizer(), [], ("xyz",))
    for byte in "aé".encode():
        text.add(byte, f"{byte:x}")
    assert text.take() == ("aé", ["61", "c3", "a9"], [0, 1, 1])
    for token in b"xy":
        text.add(token, chr(token))
    assert text.take() == ("", [], [])
    text.add(ord("q"), "q")
    assert text.take() == ("xyq", ["x", "y", "q"], [2, 3, 4])


def test_items_of_a_stop_string_are_not_shown() -> None:
    text: Text[str] = Text(tokenizer(), [], ("xyz",))
    for token in b"axyz":
        text.add(token, chr(token))
    assert text.take() == ("a", ["a"], [0])


@given(
    text=st.text(alphabet="ab\n€🙂", max_size=12),
    stops=st.lists(st.text(alphabet="ab\n€", min_size=1, max_size=3), max_size=3),
)
def test_the_pieces_are_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    pieces, done = shown(list(text.encode()), tuple(stops))
    whole = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert whole == text and not done.stopped
        return
    seen = text[: min(ends)]  # all that had been made when the first stop string was complete
    assert done.stopped
    assert whole == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert not any(stop in whole for stop in stops)


_BYTES = [0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0xEF, 0xBF, 0xBD, 65, 32]


@given(made=st.lists(st.sampled_from(_BYTES), max_size=16))
def test_bytes_that_are_no_text_are_replaced_once_it_is_sure(made: list[int]) -> None:
    """Models emit them now and then."""
    pieces, _ = shown(made)
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    whole = bytes(made).decode(errors="replace")
    assert whole.startswith("".join(pieces)) and not whole[len("".join(pieces)) :].strip("\ufffd")


@given(
    prompt=st.lists(st.sampled_from([*_BYTES, 256, 257, 258]), max_size=9),
    made=st.lists(st.sampled_from([*_BYTES, 256, 257, 258]), max_size=16),
)
def test_no_bytes_break_it_where_they_are_tokens(prompt: list[int], made: list[int]) -> None:
    """There a run of bytes reads differently as it grows, and prompts may end within a character."""
    text: Text[int] = Text(fallback_tokenizer(), prompt)
    for token in made:
        text.add(token, token)
        assert not text.take().text.endswith("\ufffd")


def test_bytes_of_tokens() -> None:
    assert token_bytes(tokenizer(), ord("a")) == [97]
    assert token_bytes(tokenizer(), 0xE2) == [0xE2]
    assert token_bytes(fallback_tokenizer(), 0xE2) == [0xE2]
    assert token_bytes(fallback_tokenizer(), 256) == list(b"a")
    assert token_bytes(tokenizer(), START) == list(b"<s>")


def test_the_space_after_a_prompt_is_kept() -> None:
    """SentencePiece drops the first space of a text; the answer to a prompt is not the first of it."""
    text: Text[int] = Text(fallback_tokenizer(), [257])
    text.add(256, 0)
    assert text.take().text == " a"
