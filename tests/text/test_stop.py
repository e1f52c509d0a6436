"""Stop strings in pieces against searching the whole text."""

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl.text.stop import StopMatcher, StopStrings

SHORT = st.text("ab", min_size=1, max_size=5)
STOPS = st.lists(SHORT | st.text("ab世🎉", min_size=1, max_size=3), min_size=1, max_size=4)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """Text shown in total, and whether a stop string was found."""
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
        if matched:
            return shown, True
    return shown + matcher.finish(), False


def first_match(stops: list[str], text: str) -> tuple[str, bool]:
    """The reference: of all first occurrences the one complete first, the longest of equals."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    end, minus_length = min(found)
    return text[: end + minus_length], True


@settings(max_examples=600)
@given(stops=STOPS, text=st.text("ab世🎉", max_size=40), cuts=st.lists(st.integers(0, 40), max_size=12))
def test_any_cutting_gives_what_searching_the_whole_text_gives(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert feed(stops, pieces) == first_match(stops, text)
    assert feed(stops, list(text)) == first_match(stops, text)


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[list[str], str]:
    """Stop strings of 5 to 9 characters that may repeat themselves, and a text made of parts of them."""
    stops = draw(
        st.lists(st.text("ab", min_size=5, max_size=9) | st.text("abc", min_size=5), min_size=1, max_size=2)
    )
    stops = [stop[:9] for stop in stops]
    ends = st.tuples(st.sampled_from(stops), st.integers(0, 8), st.integers(1, 9))
    parts = ends.map(lambda drawn: drawn[0][drawn[1] :][: drawn[2]] if drawn[2] % 2 else drawn[0][: drawn[2]])
    return stops, "".join(draw(st.lists(parts, max_size=8)))


@settings(max_examples=200)
@given(case=overlapping(), cuts=st.lists(st.integers(0, 60), max_size=6))
@example(case=(["abcabd"], "abcabcabd!"), cuts=[5])
@example(case=(["aabaaab"], "aabaabaaab!"), cuts=[6])
@example(case=(["aabaaac"], "aabaaabaaac!"), cuts=[7])
@example(case=(["aaabb"], "aaabaabb"), cuts=[])
@example(case=(["ababbb"], "ababbabbb"), cuts=[])
def test_a_stop_string_that_repeats_itself_is_found_in_its_false_starts_if_it_is_there(
    case: tuple[list[str], str], cuts: list[int]
) -> None:
    stops, text = case
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    assert feed(stops, [text[a:b] for a, b in itertools.pairwise(places)]) == first_match(stops, text)


@settings(max_examples=300)
@given(stops=STOPS, text=st.text("ab", max_size=30))
def test_only_what_could_still_become_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for count, char in enumerate(text, start=1):
        safe, matched = matcher.push(char)
        shown += safe
        if matched:
            return
        seen = text[:count]
        possible = [n for n in range(1, count + 1) if any(stop.startswith(seen[-n:]) for stop in stops)]
        assert shown == seen[: count - max(possible, default=0)]


def test_a_stop_string_over_three_pieces_never_shows() -> None:
    assert feed(["\n\nUser:"], ["Hello", "\n", "\nUs", "er: and more"]) == ("Hello", True)


def test_a_false_start_comes_out_in_full() -> None:
    assert feed(["\n\nUser:"], ["Hello", "\n\nUs", "ually"]) == ("Hello\n\nUsually", False)
    assert feed(["END"], ["the EN"]) == ("the EN", False)


def test_without_stops_everything_passes() -> None:
    assert feed([], ["a", "b"]) == ("ab", False)


def test_a_long_stop_string_costs_no_more_than_its_length() -> None:
    stop = "a" * 20_000 + "b"
    assert feed([stop], ["a" * 50_000]) == ("a" * 50_000, False)
    assert feed([stop], ["a" * 30_000 + "b"]) == ("a" * 10_000, True)


def test_outputs_that_share_the_tables_do_not_disturb_each_other() -> None:
    strings = StopStrings(["ab"])
    first, second = StopMatcher(strings), StopMatcher(strings)
    assert first.push("xa") == ("x", False)
    assert second.push("b") == ("b", False)
    assert first.push("b") == ("", True)


def test_text_that_was_given_out_at_the_end_is_no_beginning_of_a_later_match() -> None:
    matcher = StopMatcher(StopStrings(["abc"]))
    assert matcher.push("xab") == ("x", False)
    assert matcher.finish() == "ab"
    assert matcher.push("cab") == ("c", False)
    assert matcher.finish() == "ab"
