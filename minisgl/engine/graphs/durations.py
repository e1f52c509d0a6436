"""Estimates durations of all sizes from measurements of some, by linear interpolation."""

from bisect import bisect_left, insort


class MeasuredDurations:
    """Measured microseconds by size."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # ascending
        self._durations_us: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def largest(self) -> int:
        """The largest measured size."""
        return self._sizes[-1]

    def add(self, size: int, duration_us: int) -> None:
        """Add a measurement, or replace the one of the same size."""
        if size not in self._durations_us:
            insort(self._sizes, size)
        self._durations_us[size] = duration_us

    def estimate_us(self, size: int) -> float:
        """Estimate a size's duration by linear interpolation between the measured sizes.

        Above the largest size it extends the last line, unless that line falls. Below the smallest size it
        returns the smallest size's duration. It returns 0 if nothing was measured.
        """
        if len(self._sizes) < 2 or size <= self._sizes[0]:
            return float(self._durations_us[self._sizes[0]]) if self._sizes else 0.0
        index = min(bisect_left(self._sizes, size), len(self._sizes) - 1)
        low, high = self._sizes[index - 1], self._sizes[index]
        low_us, high_us = self._durations_us[low], self._durations_us[high]
        per_size_us = (high_us - low_us) / (high - low)
        return high_us + (min(size, high) - high) * per_size_us + max(0, size - high) * max(0.0, per_size_us)
