"""Lines through measured durations."""

from minisgl.engine.graphs.durations import MeasuredDurations


def test_sizes_that_were_not_measured_lie_on_the_lines_between_those_that_were() -> None:
    measured = MeasuredDurations()
    assert (len(measured), measured.estimate_us(7)) == (0, 0.0)
    measured.add(16, 400)
    assert [measured.estimate_us(size) for size in (1, 16, 99)] == [400, 400, 400]
    measured.add(64, 900)
    measured.add(32, 600)
    assert measured.largest == 64
    assert len(measured) == 3
    expected = {1: 400, 16: 400, 20: 450, 32: 600, 48: 750, 64: 900, 65: 900 + 300 / 32, 128: 1500}
    assert {size: measured.estimate_us(size) for size in expected} == expected
    measured.add(64, 1000)
    assert measured.estimate_us(48) == 800
    measured.add(64, 500)
    assert [measured.estimate_us(size) for size in (48, 64, 128)] == [550, 500, 500], (
        "more never takes less time"
    )
