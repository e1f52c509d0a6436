"""Converts a GGUF file once into a Hugging Face folder in the cache.

Promise: the folder appears complete or not at all; a changed file is converted again.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from minisgl.errors import ModelError, ModelNotHereError
from minisgl.progress import Progress, no_progress
from minisgl.weights.builtin_models import CONVERTER_VERSION
from minisgl.weights.file_lock import file_lock
from minisgl.weights.gguf_convert import convert_gguf

logger = logging.getLogger(__name__)


def gguf_folder(
    file: Path,
    cache_dir: Path,
    *,
    with_tokenizer: bool = True,
    may_convert: bool = True,
    progress: Progress = no_progress,
) -> Path:
    """The Hugging Face folder converted from `file`, in bfloat16; quick if it exists already.

    Raises:
        ModelError: the file can't be converted (see `convert_gguf`), or the cache can't be written.
        ModelNotHereError: the file has not been converted yet and `may_convert` is False.
    """
    stat = file.stat()
    source = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns} {CONVERTER_VERSION} {with_tokenizer}"
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    folder = cache_dir / "gguf" / f"{file.stem}-{digest}"
    if folder.is_dir():
        return folder
    if not may_convert:
        raise ModelNotHereError(f"{file} has not been converted yet; serving or running it once does that")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.parent / f".{folder.name}.lock"):
            if folder.is_dir():  # another process has made it while this one waited
                return folder
            for leftover in folder.parent.glob(f".{folder.name}.build-*"):
                shutil.rmtree(leftover)  # from a conversion that was killed
            build = Path(tempfile.mkdtemp(prefix=f".{folder.name}.build-", dir=folder.parent))
            try:
                convert_gguf(file, build, with_tokenizer=with_tokenizer, progress=progress)
                os.replace(build, folder)
            finally:
                shutil.rmtree(build, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"can't store what {file.name} is converted to under {cache_dir}: {error.strerror or error}; "
            "free some space, or choose another place with MINISGL_CACHE"
        ) from error
    logger.info("%s is ready in %s", file.name, folder)
    return folder
