"""What compiled code belongs to."""

from pathlib import Path

from starts import FACTS, OTHER

from compile_cache.key import entry_name, sources_digest


def test_every_change_of_a_source_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    seen = {sources_digest([tmp_path])}
    for name, text in (("a/k.py", "1"), ("a/k.py", "2"), ("a/l.py", "2"), ("tuned.json", "{}")):
        (tmp_path / name).write_text(text)
        seen.add(sources_digest([tmp_path]))
    assert len(seen) == 5
    (tmp_path / "notes.txt").write_text("no source")
    assert sources_digest([tmp_path]) in seen


def test_other_facts_have_another_entry() -> None:
    names = {entry_name(facts) for facts in (FACTS, OTHER, {**FACTS, "driver": "581"})}
    assert len(names) == 3
    assert all(name.startswith("nvidia-") for name in names)
