"""The compile cache on disk: whatever state it is in, a start gets files it can trust or none."""

import json
import multiprocessing
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from compile_cache import store
from compile_cache.key import entry_name, sources_digest
from compile_cache.store import CacheError, OpenCache, open_cache

FACTS = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11"}
OTHER = {**FACTS, "gpu": "NVIDIA L4"}
CONTENT = {"inductor/ab/code.py": "print(1)", "triton/K/kernel.cubin": "\x00\x01" * 500}


def start(root: Path, facts: dict[str, str] = FACTS) -> tuple[OpenCache, dict[str, str]]:
    environ: dict[str, str] = {}
    cache = open_cache(root, facts, environ)
    assert cache is not None
    return cache, environ


def compile_something(environ: dict[str, str]) -> None:
    files = Path(environ["TRITON_CACHE_DIR"]).parent
    for name, text in CONTENT.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        partial = files / f"{name}.{os.getpid()}.tmp"
        partial.write_text(text)
        partial.replace(files / name)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A root with one whole entry that nobody is using."""
    root = tmp_path / "compiled"
    cache, environ = start(root)
    assert cache.was_empty
    compile_something(environ)
    cache.seal()
    cache.close()
    return root


def files_offered(root: Path, facts: dict[str, str] = FACTS) -> tuple[dict[str, str], str]:
    """What a start finds, and what it is told."""
    cache, environ = start(root, facts)
    files = Path(environ["TRITON_CACHE_DIR"]).parent
    found = {p.relative_to(files).as_posix(): p.read_text() for p in files.rglob("*") if p.is_file()}
    assert cache.was_empty == (not found)
    cache.close()
    return found, cache.note


def entry_of(root: Path) -> Path:
    return root / entry_name(FACTS)


def test_the_second_start_finds_what_the_first_compiled(sealed: Path) -> None:
    assert files_offered(sealed) == (CONTENT, "")


def test_torch_and_triton_are_pointed_into_the_entry_which_is_the_users_alone(tmp_path: Path) -> None:
    cache, environ = start(tmp_path / "a" / "b")
    assert set(environ) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    for folder in (tmp_path / "a" / "b", entry_of(tmp_path / "a" / "b")):
        assert folder.stat().st_mode & 0o777 == 0o700
    cache.close()


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_user_who_pointed_torch_elsewhere_is_left_alone(tmp_path: Path, variable: str) -> None:
    environ = {variable: "/elsewhere"}
    assert open_cache(tmp_path, FACTS, environ) is None
    assert environ == {variable: "/elsewhere"}


@pytest.mark.parametrize("damage", ["truncated", "poisoned", "missing", "replaced by a link"])
def test_a_damaged_entry_is_put_aside_and_built_anew(sealed: Path, damage: str) -> None:
    victim = entry_of(sealed) / "files" / "triton/K/kernel.cubin"
    if damage == "truncated":
        victim.write_text(victim.read_text()[:10])
    elif damage == "poisoned":
        victim.write_text("\x00\x02" * 500)
    else:
        victim.unlink()
    if damage == "replaced by a link":
        (sealed / "elsewhere").write_text(CONTENT["triton/K/kernel.cubin"])
        victim.symlink_to(sealed / "elsewhere")
    found, note = files_offered(sealed)
    assert found == {}
    assert "kernel.cubin" in note
    assert "put aside" in note
    assert entry_of(sealed).with_name(entry_of(sealed).name + store.QUARANTINE).is_dir()
    assert files_offered(sealed) == ({}, "")


@pytest.mark.parametrize(
    "seal", ["", "{", "[]", '{"format": 99}', '{"format": 1, "facts": {}, "files": {"../x": [1, "a"]}}']
)
def test_a_broken_seal_is_a_damaged_entry(sealed: Path, seal: str) -> None:
    (entry_of(sealed) / "seal.json").write_text(seal)
    found, note = files_offered(sealed)
    assert found == {}
    assert "put aside" in note


def test_another_gpus_entry_under_our_name_is_not_used(sealed: Path) -> None:
    shutil.copytree(entry_of(sealed), sealed / entry_name(OTHER))
    found, note = files_offered(sealed, OTHER)
    assert found == {}
    assert "another machine" in note
    assert files_offered(sealed) == (CONTENT, "")


def test_what_a_killed_start_left_is_deleted(sealed: Path) -> None:
    cache, environ = start(sealed)
    (Path(environ["TRITON_CACHE_DIR"]) / "half").mkdir()
    (Path(environ["TRITON_CACHE_DIR"]) / "half" / "kernel.cubin").write_text("hal")
    cache.close()  # as the system does for a killed process: no seal
    assert files_offered(sealed) == (CONTENT, "")


def test_a_first_start_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    cache, environ = start(tmp_path)
    compile_something(environ)
    cache.close()
    assert files_offered(tmp_path) == ({}, "")


def test_a_start_beside_another_compiles_for_itself_and_leaves_no_trace(sealed: Path) -> None:
    first, first_environ = start(sealed)
    second, environ = start(sealed)
    assert second.was_empty
    assert "another start" in second.note
    assert environ != first_environ
    compile_something(environ)
    second.seal()
    second.close()
    assert not Path(environ["TRITON_CACHE_DIR"]).parent.exists()
    first.seal()
    first.close()
    assert files_offered(sealed) == (CONTENT, "")


def test_a_start_beside_a_running_engine_shares_its_entry(sealed: Path) -> None:
    running, environ = start(sealed)
    running.seal()
    late = Path(environ["TRITON_CACHE_DIR"]) / "late.cubin"
    late.write_text("compiled while serving")
    second, second_environ = start(sealed)
    assert (second.note, second_environ) == ("", environ)
    assert late.exists()
    second.seal()
    second.close()
    running.close()
    assert files_offered(sealed)[0] == {**CONTENT, "triton/late.cubin": "compiled while serving"}


def test_files_that_somebody_is_writing_are_not_sealed(tmp_path: Path) -> None:
    cache, environ = start(tmp_path)
    compile_something(environ)
    folder = Path(environ["TRITON_CACHE_DIR"]) / "tmp.pid_1_2"
    folder.mkdir()
    (folder / "kernel.cubin").write_text("ha")
    cache.seal()
    shutil.rmtree(folder)
    cache.close()
    assert files_offered(tmp_path) == (CONTENT, "")


def _start_and_seal(root: Path, barrier, results) -> None:
    barrier.wait()
    cache, environ = start(root)
    compile_something(environ)
    cache.seal()
    cache.close()
    results.put(cache.note)


def test_starts_at_the_same_moment_all_succeed_and_leave_a_whole_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_start_and_seal, args=(tmp_path, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    notes = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert all("put aside" not in note for note in notes)
    assert files_offered(tmp_path)[0] == CONTENT


def test_a_folder_that_others_may_write_is_refused(sealed: Path) -> None:
    os.chmod(entry_of(sealed), 0o777)
    with pytest.raises(CacheError, match="others may write"):
        open_cache(sealed, FACTS, {})


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="can't be used"):
        open_cache(tmp_path / "file", FACTS, {})


def test_the_list_names_sizes_and_what_is_wrong(sealed: Path) -> None:
    (info,) = store.list_entries(sealed)
    assert (info.name, info.facts, info.num_files, info.problem) == (entry_name(FACTS), FACTS, 2, "")
    assert info.num_bytes == sum(len(text.encode()) for text in CONTENT.values())
    (entry_of(sealed) / "files" / "inductor/ab/code.py").write_text("x")
    assert "code.py" in store.list_entries(sealed)[0].problem


def test_clear_frees_what_nobody_uses(sealed: Path) -> None:
    cache, _ = start(sealed)
    assert store.clear(sealed) == 0
    cache.seal()
    assert store.clear(sealed) == 0
    cache.close()
    assert store.clear(sealed) > 1000
    assert store.list_entries(sealed) == []


def test_an_exported_cache_serves_on_another_machine_of_the_same_kind(sealed: Path, tmp_path: Path) -> None:
    assert store.export_entries(sealed, tmp_path / "cache.tar.gz") == 1
    other = tmp_path / "other"
    assert store.import_entries(other, tmp_path / "cache.tar.gz") == [entry_name(FACTS)]
    assert files_offered(other) == (CONTENT, "")


def test_an_import_refuses_what_is_not_whole_and_changes_nothing(sealed: Path, tmp_path: Path) -> None:
    packed = tmp_path / "cache.tar.gz"
    store.export_entries(sealed, packed)
    content = packed.read_bytes()
    for bad in (b"", b"nonsense", content[: len(content) // 2]):
        (tmp_path / "bad.tar.gz").write_bytes(bad)
        with pytest.raises(CacheError):
            store.import_entries(tmp_path / "other", tmp_path / "bad.tar.gz")
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
            store.import_entries(tmp_path / "other", tmp_path / "bad.tar.gz")
    renamed = tmp_path / "renamed"
    shutil.copytree(sealed, renamed)
    seal = renamed / entry_name(FACTS) / "seal.json"
    seal.write_text(json.dumps({**json.loads(seal.read_text()), "facts": OTHER}))
    store.export_entries(renamed, packed)
    with pytest.raises(CacheError, match="not named"):
        store.import_entries(tmp_path / "other", packed)
    assert store.list_entries(tmp_path / "other") == []
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == []


def test_there_must_be_something_to_export(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no compiled code"):
        store.export_entries(tmp_path, tmp_path / "cache.tar.gz")


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
