"""Keys change what `minisgl top` shows."""

from made_up import made_request, made_snapshot

from minisgl.top.state import State


def state_of_three() -> State:
    requests = [
        made_request(1, total_ms=10.0, output_tokens=5),
        made_request(2, total_ms=30.0, output_tokens=1, state="queued"),
        made_request(3, total_ms=20.0, output_tokens=9, state="ended", end="stop"),
    ]
    return State(snapshot=made_snapshot(requests))


def numbers(state: State) -> list[int]:
    return [one.number for one in state.requests()]


def test_s_goes_through_all_orders() -> None:
    state = state_of_three()
    orders = []
    for _ in range(5):
        orders.append(numbers(state))
        state.take("s")
    by_arrival, by_time, by_first, by_prompt, by_output = orders
    assert (by_arrival, by_time, by_output) == ([3, 2, 1], [2, 3, 1], [3, 1, 2])
    assert by_first == by_arrival
    assert by_prompt == [3, 2, 1]
    assert numbers(state) == by_arrival


def test_f_shows_open_then_waiting_requests() -> None:
    state = state_of_three()
    state.take("f")
    assert numbers(state) == [2, 1]
    state.take("f")
    assert numbers(state) == [2]
    state.take("f")
    assert numbers(state) == [3, 2, 1]


def test_the_choice_stays_with_its_request_when_the_order_changes() -> None:
    state = state_of_three()
    state.take("down")
    state.take("down")
    chosen = state.chosen_request()
    assert chosen is not None
    assert chosen.number == 2
    state.take("s")
    assert state.chosen == 2
    state.take("up")
    assert state.chosen == 2, "it is the first now"


def test_moving_stops_at_both_ends() -> None:
    state = state_of_three()
    state.take("page-down")
    assert state.chosen == 3
    state.take("page-down")
    assert state.chosen == 1
    state.take("page-up")
    assert state.chosen == 3


def test_abort_asks_first_and_only_y_means_yes() -> None:
    state = state_of_three()
    state.take("a")
    assert state.confirms is None
    assert "choose" in state.message
    state.chosen = 1
    state.take("a")
    state.take("n")
    assert state.aborts == []
    assert state.confirms is None
    state.take("a")
    state.take("y")
    assert [one.number for one in state.aborts] == [1]


def test_an_ended_request_is_not_aborted() -> None:
    state = state_of_three()
    state.chosen = 3
    state.take("a")
    assert state.confirms is None
    assert state.message == "it has ended"


def test_q_leaves_but_not_while_a_question_is_open() -> None:
    state = state_of_three()
    state.chosen = 1
    state.take("a")
    assert state.take("q")
    assert not state.take("q")
    assert not state.take("ctrl-c")


def test_every_key_is_harmless_without_a_snapshot() -> None:
    state = State()
    for key in ("up", "down", "page-up", "enter", "escape", "s", "f", "a", "e", "x"):
        assert state.take(key)


def test_all_engines_are_shown_and_e_shows_one_after_the_other() -> None:
    snapshot = made_snapshot([made_request(number) for number in (1, 2, 3)], num_engines=2)
    state = State(snapshot=snapshot)
    assert numbers(state) == [3, 2, 1]
    assert [state.engine_of(number) for number in (1, 2, 3, 9)] == [0, 1, 0, None]
    for shown in ([3, 1], [2], [3, 2, 1]):
        state.take("e")
        assert numbers(state) == shown


def test_e_does_nothing_with_one_engine() -> None:
    state = State(snapshot=made_snapshot([made_request(1)]), chosen=1)
    state.take("e")
    assert (numbers(state), state.engine, state.chosen) == ([1], None, 1)


def test_an_engine_that_the_server_has_no_more_gives_way_to_the_last_one() -> None:
    state = State(snapshot=made_snapshot([made_request(1)]), engine=3)
    assert numbers(state) == [1]
