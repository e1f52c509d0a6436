"""The form of CHANGELOG.md: versions in order, each with upgrade notes, and none ahead of the code."""

import re
from pathlib import Path

from packaging.version import Version

from minisgl import __version__

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
RELEASE = re.compile(r"(\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)")


def sections() -> dict[str, str]:
    """The text of each version's section, newest first."""
    _, *parts = SECTION.split(CHANGELOG.read_text(encoding="utf-8"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_versions_are_dated_in_order_and_not_ahead_of_the_code() -> None:
    first, *released = sections()
    assert first == "Unreleased"
    versions = [Version(found[1]) for name in released if (found := RELEASE.fullmatch(name))]
    assert len(versions) == len(released), "a release is named as in '## 0.1.0 (2026-11-30)'"
    assert versions == sorted(set(versions), reverse=True)
    assert not versions or versions[0] <= Version(__version__)


def test_every_version_begins_with_what_an_upgrade_needs() -> None:
    for name, text in sections().items():
        assert text.lstrip().startswith("### Upgrade notes\n"), name
