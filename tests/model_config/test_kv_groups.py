"""Which layers share a group of the cache."""

from minisgl.model_config.kv_groups import KVGroup, KVShape, StateShape, group_layers

SMALL, LARGE = KVShape(2, 64), KVShape(1, 128)
STATE = StateShape(num_heads=4, key_dim=8, value_dim=16, conv_channels=96, conv_tokens=3)


def test_a_model_without_windows_has_one_group() -> None:
    assert group_layers([SMALL] * 3) == (KVGroup((0, 1, 2), 0, 3 * 256),)


def test_groups_that_keep_all_come_first_then_long_windows() -> None:
    groups = group_layers([SMALL] * 4, [16, 32, 0, 16])
    assert [(group.kind, group.window, group.layers) for group in groups] == [
        ("all", 0, (2,)),
        ("window", 32, (1,)),
        ("window", 16, (0, 3)),
    ]


def test_a_window_as_long_as_the_context_is_none() -> None:
    (group,) = group_layers([SMALL] * 2, [64, 0], max_context_tokens=64)
    assert group == KVGroup((0, 1), 0, 512)


def test_layers_of_other_shapes_count_what_they_store() -> None:
    assert group_layers([SMALL, LARGE, SMALL], [8, 0, 8]) == (KVGroup((1,), 0, 256), KVGroup((0, 2), 8, 512))
    assert group_layers([SMALL, LARGE]) == (KVGroup((0, 1), 0, 512),)


def test_layers_that_read_anothers_keys_are_in_its_group_and_store_nothing() -> None:
    groups = group_layers([SMALL] * 4, [8, 0, 0, 8], [0, 1, 1, 0])
    assert groups == (KVGroup((1, 2), 0, 256), KVGroup((0, 3), 8, 256))


def test_states_come_last_and_count_per_row() -> None:
    keys, states = group_layers([STATE, STATE, SMALL, STATE])
    assert keys == KVGroup((2,), 0, 256)
    assert (states.kind, states.layers, states.elements_per_token) == ("state", (0, 1, 3), 0)
    assert states.state_bytes(2) == 3 * (4 * 4 * 8 * 16 + 96 * 3 * 2)
