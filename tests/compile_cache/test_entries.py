"""Looking after the compile cache: what is listed, deleted, packed and unpacked."""

import json
import multiprocessing
import random
import shutil
import tarfile
from pathlib import Path

import pytest
from starts import CONTENT, FACTS, OTHER, compile_something, entry_of, files_offered, start

from compile_cache import entries
from compile_cache.entries import clear, export_entries, import_entries, list_entries
from compile_cache.key import entry_name
from compile_cache.manifest import CacheError


def test_the_list_names_sizes_and_what_is_wrong(published: Path) -> None:
    (info,) = list_entries(published)
    assert (info.name, info.facts, info.num_files, info.problem) == (entry_name(FACTS), FACTS, 2, "")
    assert info.num_bytes == sum(len(text.encode()) for text in CONTENT.values())
    (entry_of(published) / "files" / "inductor/ab/c7tmpa.py").write_text("x")
    assert "c7tmpa.py" in list_entries(published)[0].problem


def test_clear_frees_what_nobody_uses(published: Path) -> None:
    cache, _ = start(published)
    assert clear(published) == 0
    cache.publish()
    assert clear(published) == 0
    cache.close()
    assert clear(published) > 1000
    assert list_entries(published) == []


def test_an_exported_cache_serves_on_another_machine_of_the_same_kind(
    published: Path, tmp_path: Path
) -> None:
    assert export_entries(published, tmp_path / "cache.tar.gz") == 1
    other = tmp_path / "other"
    assert import_entries(other, tmp_path / "cache.tar.gz") == [entry_name(FACTS)]
    assert files_offered(other) == (CONTENT, "")


def test_an_import_refuses_what_is_not_whole_and_changes_nothing(published: Path, tmp_path: Path) -> None:
    packed = tmp_path / "cache.tar.gz"
    export_entries(published, packed)
    content = packed.read_bytes()
    middle = len(content) // 2
    flipped = (
        content[:middle]
        + bytes(byte ^ 0xFF for byte in content[middle : middle + 40])
        + content[middle + 40 :]
    )
    for bad in (b"", b"nonsense", content[:middle], flipped):
        (tmp_path / "bad.tar.gz").write_bytes(bad)
        with pytest.raises(CacheError):
            import_entries(tmp_path / "other", tmp_path / "bad.tar.gz")
    for name, kind in (
        ("../evil", tarfile.REGTYPE),
        ("/evil", tarfile.REGTYPE),
        ("entry/link", tarfile.SYMTYPE),
    ):
        with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = "/etc/passwd"
            archive.addfile(member)
        with pytest.raises(CacheError, match="does not belong"):
            import_entries(tmp_path / "other", tmp_path / "bad.tar.gz")
    renamed = tmp_path / "renamed"
    shutil.copytree(published, renamed)
    manifest = renamed / entry_name(FACTS) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "facts": OTHER}))
    export_entries(renamed, packed)
    with pytest.raises(CacheError, match="not named"):
        import_entries(tmp_path / "other", packed)
    assert list_entries(tmp_path / "other") == []
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == []


def test_an_import_leaves_an_entry_alone_that_is_in_use(published: Path, tmp_path: Path) -> None:
    export_entries(published, tmp_path / "cache.tar.gz")
    running, _ = start(published)
    running.publish()
    with pytest.raises(CacheError, match="in use"):
        import_entries(published, tmp_path / "cache.tar.gz")
    running.close()
    assert import_entries(published, tmp_path / "cache.tar.gz") == [entry_name(FACTS)]
    assert files_offered(published) == (CONTENT, "")


def test_what_cannot_be_written_is_said(published: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no/such/folder"):
        export_entries(published, tmp_path / "no/such/folder/cache.tar.gz")
    export_entries(published, tmp_path / "cache.tar.gz")
    with pytest.raises(CacheError, match="can't be written"):
        import_entries(tmp_path / "cache.tar.gz", tmp_path / "cache.tar.gz")


def test_a_first_start_that_still_runs_is_listed_as_such(tmp_path: Path) -> None:
    cache, environ = start(tmp_path)
    compile_something(environ)
    (info,) = list_entries(tmp_path)
    assert (info.facts, info.num_files) == ({}, 2)
    assert "still runs" in info.problem
    cache.close()


def _start_list_and_clear(root: Path, seed: int, results) -> None:
    rng = random.Random(seed)
    said = []
    try:
        for _ in range(60):
            cache, environ = start(root)
            compile_something(environ)
            if rng.random() < 0.7:
                cache.publish()
            said.append(cache.note)
            list_entries(root)
            cache.close()
            if rng.random() < 0.2:
                clear(root)
    except Exception as error:
        said.append(repr(error))
    results.put(said)


def test_starts_lists_and_clears_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_start_list_and_clear, args=(tmp_path, seed, results)) for seed in range(3)
    ]
    for process in processes:
        process.start()
    said = {text for _ in processes for text in results.get(timeout=60)}
    for process in processes:
        process.join()
    beside = "another start is using the compile cache; this start compiles for itself"
    assert said <= {"", beside}
    assert not list(tmp_path.glob(".start-*"))


def test_an_entry_that_another_process_deletes_at_the_same_time_is_no_error(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = entries.entries_in(published)
    assert listed
    assert clear(published)
    monkeypatch.setattr(entries, "entries_in", lambda root: listed)  # as if listed before that
    assert clear(published) == 0


def test_there_must_be_something_to_export(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no compiled code"):
        export_entries(tmp_path, tmp_path / "cache.tar.gz")
