"""A start and its entry: whatever state the folder is in, a start gets files it can trust or none."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from starts import CONTENT, FACTS, OTHER, compile_something, entry_of, files_offered, start
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from compile_cache.key import entry_name
from compile_cache.manifest import CacheError
from compile_cache.store import QUARANTINE, UNUSED_S, VARIABLES, open_cache


def test_the_second_start_finds_what_the_first_compiled(published: Path) -> None:
    assert files_offered(published) == (CONTENT, "")


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
def test_a_damaged_entry_is_put_aside_and_built_anew(published: Path, damage: str) -> None:
    victim = entry_of(published) / "files" / "triton/K/kernel.cubin"
    if damage == "truncated":
        victim.write_text(victim.read_text()[:10])
    elif damage == "poisoned":
        victim.write_text("\x00\x02" * 500)
    else:
        victim.unlink()
    if damage == "replaced by a link":
        (published / "elsewhere").write_text(CONTENT["triton/K/kernel.cubin"])
        victim.symlink_to(published / "elsewhere")
    found, note = files_offered(published)
    assert found == {}
    assert "kernel.cubin" in note
    assert "put aside" in note
    assert entry_of(published).with_name(entry_of(published).name + QUARANTINE).is_dir()
    assert files_offered(published) == ({}, "")


@pytest.mark.parametrize(
    "manifest",
    ["", "{", "[]", '{"format": 99}', '{"format": 1, "facts": {}, "place": "", "files": {"../x": [1, "a"]}}'],
)
def test_a_broken_manifest_is_a_damaged_entry(published: Path, manifest: str) -> None:
    (entry_of(published) / "manifest.json").write_text(manifest)
    found, note = files_offered(published)
    assert found == {}
    assert "put aside" in note


def test_another_gpus_entry_under_our_name_is_not_used(published: Path) -> None:
    shutil.copytree(entry_of(published), published / entry_name(OTHER))
    found, note = files_offered(published, OTHER)
    assert found == {}
    assert "another machine" in note
    assert files_offered(published) == (CONTENT, "")


def test_closing_leaves_the_environment_as_it_was_and_the_process_may_start_again(published: Path) -> None:
    environ: dict[str, str] = {}
    for _ in range(2):
        cache = open_cache(published, FACTS, environ)
        assert cache is not None
        assert Path(environ["TRITON_CACHE_DIR"], "K/kernel.cubin").exists()
        cache.publish()
        cache.close()
        assert environ == {}


def test_two_engines_of_one_process_share_the_entry_and_both_publish_it(published: Path) -> None:
    environ: dict[str, str] = {}
    first = open_cache(published, FACTS, environ)
    assert first is not None
    first.publish()
    second = open_cache(published, FACTS, environ)
    assert second is not None
    (Path(environ["TRITON_CACHE_DIR"]) / "second.cubin").write_text("2")
    second.publish()
    first.close()
    second.close()
    assert environ == {}
    assert files_offered(published)[0] == {**CONTENT, "triton/second.cubin": "2"}


def test_variables_inherited_from_an_engine_are_no_wish_of_the_user(published: Path) -> None:
    parent, environ = start(published)
    parent.publish()
    inherited = dict(environ)
    parent.close()
    child = open_cache(published, FACTS, inherited)
    assert child is not None
    child.close()


def test_a_forked_child_does_not_keep_the_entry_locked(published: Path) -> None:
    cache, _ = start(published)
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    try:
        cache.close()
        assert files_offered(published) == (CONTENT, "")
    finally:
        child.kill()
        child.join()


def _die_beside_another_start(root: Path) -> None:
    _, environ = start(root)
    compile_something(environ)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_start_compiled_for_itself_goes_with_the_next_start(published: Path) -> None:
    first, _ = start(published)
    killed = multiprocessing.get_context("fork").Process(target=_die_beside_another_start, args=(published,))
    killed.start()
    killed.join()
    left = list(published.glob(".start-*"))
    assert len(left) == 1
    living, environ = start(published)
    assert not left[0].exists()
    compile_something(environ)
    start(published)[0].close()
    assert Path(environ["TRITON_CACHE_DIR"]).exists()
    living.close()
    first.close()


def test_a_manifest_that_cannot_be_written_leaves_the_former_one(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, environ = start(published)
    (Path(environ["TRITON_CACHE_DIR"]) / "more.cubin").write_text("more")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(CacheError, match="No space left"):
            cache.publish()
    assert start(published)[0].note == ""  # it is over with starting: others need not compile for themselves
    cache.close()
    assert files_offered(published)[0] == CONTENT


def test_a_moved_entry_says_where_its_files_are_now(tmp_path: Path) -> None:
    cache, environ = start(tmp_path / "here")
    kernel = Path(environ["TRITON_CACHE_DIR"]) / "K"
    kernel.mkdir(parents=True)
    (kernel / "k.cubin").write_text("binary")
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": str(kernel / "k.cubin")}}))
    (kernel / "__grp__other.json").write_text("of another Triton")
    cache.publish()
    cache.close()
    shutil.copytree(tmp_path / "here", tmp_path / "there")  # the former place stays and must not be used
    for _ in range(2):
        found, note = files_offered(tmp_path / "there")
        assert note == ""
        moved = entry_of(tmp_path / "there") / "files" / "triton" / "K" / "k.cubin"
        assert json.loads(found["triton/K/__grp__k.json"]) == {"child_paths": {"k.cubin": str(moved)}}
        assert found["triton/K/__grp__other.json"] == "of another Triton"


COMPILE_A_KERNEL = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * 2)

triton.knobs.compilation.listener = lambda *, cache_hit, **_: print("found" if cache_hit else "compiled")
triton.compile(ASTSource(double, {"x_ptr": "*fp32"}, {}, {}), target=GPUTarget("cuda", 90, 32))
"""


def test_triton_finds_its_kernels_in_a_moved_entry(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(COMPILE_A_KERNEL)
    root = tmp_path / "first"
    for expected in ("compiled", "found"):
        cache, environ = start(root)
        said = subprocess.run(
            [sys.executable, tmp_path / "kernel.py"],
            env={**os.environ, "TRITON_INTERPRET": "0", **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert said.stdout.strip() == expected, said.stderr
        cache.publish()
        cache.close()
        root = root.rename(tmp_path / "second")


def test_what_a_killed_start_left_is_deleted(published: Path) -> None:
    cache, environ = start(published)
    (Path(environ["TRITON_CACHE_DIR"]) / "half").mkdir()
    (Path(environ["TRITON_CACHE_DIR"]) / "half" / "kernel.cubin").write_text("hal")
    cache.close()  # as the system does for a killed process: no manifest
    assert files_offered(published) == (CONTENT, "")


def test_a_first_start_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    cache, environ = start(tmp_path)
    compile_something(environ)
    cache.close()
    assert files_offered(tmp_path) == ({}, "")


def test_a_start_beside_another_compiles_for_itself_and_leaves_no_trace(published: Path) -> None:
    first, first_environ = start(published)
    second, environ = start(published)
    assert not list(Path(environ["TRITON_CACHE_DIR"]).parent.glob("*"))
    assert "another start" in second.note
    assert environ != first_environ
    compile_something(environ)
    own_folder = Path(environ["TRITON_CACHE_DIR"]).parent.parent
    second.publish()
    second.close()
    assert not own_folder.exists()
    first.publish()
    first.close()
    assert files_offered(published) == (CONTENT, "")


def test_a_start_beside_a_running_engine_shares_its_entry(published: Path) -> None:
    running, environ = start(published)
    running.publish()
    late = Path(environ["TRITON_CACHE_DIR"]) / "late.cubin"
    late.write_text("compiled while serving")
    second, second_environ = start(published)
    assert (second.note, second_environ) == ("", environ)
    assert late.exists()
    second.publish()
    second.close()
    running.close()
    assert files_offered(published)[0] == {**CONTENT, "triton/late.cubin": "compiled while serving"}


def test_files_that_somebody_is_writing_are_not_published(tmp_path: Path) -> None:
    cache, environ = start(tmp_path)
    compile_something(environ)
    folder = Path(environ["TRITON_CACHE_DIR"]) / "tmp.pid_1_2"
    folder.mkdir()
    (folder / "kernel.cubin").write_text("ha")
    cache.publish()
    shutil.rmtree(folder)
    cache.close()
    assert files_offered(tmp_path) == (CONTENT, "")


def _start_and_publish(root: Path, barrier, results) -> None:
    barrier.wait()
    cache, environ = start(root)
    compile_something(environ)
    cache.publish()
    cache.close()
    results.put(cache.note)


def test_starts_at_the_same_moment_all_succeed_and_leave_a_whole_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_start_and_publish, args=(tmp_path, barrier, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    notes = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert all("put aside" not in note for note in notes)
    assert files_offered(tmp_path)[0] == CONTENT


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
@pytest.mark.parametrize("place", ["the root", "the entry"])
def test_a_folder_that_the_group_or_others_may_write_is_refused_and_left_alone(
    place: str, mode: int, published: Path
) -> None:
    folder = published if place == "the root" else entry_of(published)
    files = sorted(folder.rglob("*"))
    folder.chmod(mode)
    environ: dict[str, str] = {}
    with pytest.raises(CacheError, match="others may write") as error:
        open_cache(published, FACTS, environ)
    assert f"others may write {folder}," in str(error.value)
    assert environ == {}
    assert sorted(folder.rglob("*")) == files
    folder.chmod(0o755)  # reading is no danger
    cache = open_cache(published, FACTS, environ)
    assert cache is not None
    cache.close()


def test_another_users_folder_is_refused(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CacheError, match="belongs to another user"):
        open_cache(published, FACTS, {})


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below", "a\0b", "a\ud800b"):
        with pytest.raises(CacheError, match="can't be used"):
            open_cache(tmp_path / place, FACTS, {})


def test_what_torch_sets_when_it_compiles_is_no_choice_of_the_users(published: Path) -> None:
    default = default_cache_dir()
    cache = open_cache(
        published, FACTS, {"TORCHINDUCTOR_CACHE_DIR": default, "TRITON_CACHE_DIR": f"{default}/triton/0"}
    )
    assert cache is not None
    cache.close()


def test_what_importing_the_engine_sets_is_no_choice_of_the_users(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, minisgl.engine.start.build\n"
        "from compile_cache.store import open_cache\n"
        f"cache = open_cache(pathlib.Path({str(tmp_path)!r}), {FACTS!r})\n"
        "print(cache is not None, os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    said = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"True {tmp_path}")


def test_entries_that_no_start_opens_any_more_go_after_two_months(published: Path) -> None:
    cache, environ = start(published, OTHER)
    compile_something(environ)
    cache.publish()
    long_ago = time.time() - UNUSED_S - 60
    other = published / entry_name(OTHER)
    for entry in (entry_of(published), other):
        os.utime(entry.with_name(entry.name + ".lock"), (long_ago, long_ago))
    aside = published / ("gone" + QUARANTINE)
    shutil.copytree(other, aside)
    os.utime(aside, (long_ago, long_ago))
    third, _ = start(published, FACTS | {"driver": "another"})
    assert not entry_of(published).exists()
    assert not aside.exists()
    assert other.exists()  # an engine is using it
    third.close()
    cache.close()


def test_opening_an_entry_keeps_it(published: Path) -> None:
    entry = entry_of(published)
    long_ago = time.time() - UNUSED_S - 60
    os.utime(entry.with_name(entry.name + ".lock"), (long_ago, long_ago))
    for _ in range(2):
        assert files_offered(published) == (CONTENT, "")
