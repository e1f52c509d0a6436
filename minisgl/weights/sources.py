"""Finds a model's folder: a built-in name, a folder, a GGUF file, or a name on the hub or on ModelScope.

Promise: `resolve_model_folder` returns a local folder with a config.json; importing this module is cheap and
loads no torch.
"""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from minisgl.errors import ConfigError, ModelError, ModelNotHereError
from minisgl.progress import Progress, no_progress
from minisgl.weights.builtin_models import BUILTIN_MODELS, builtin_folder

MODELSCOPE = "modelscope:"
"""Prefix of the names of models on ModelScope."""
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
    """`~/.cache/minisgl`. The command line uses XDG_CACHE_HOME or MINISGL_CACHE instead if they are set.

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
    takes precedence over a folder of that name; write "./name" for the folder. With `pull_missing` False
    nothing is downloaded or converted.

    Args:
        revision: branch, tag or commit of a hub name.
        tokenizer: a folder or hub name whose tokenizer and chat template replace the model's.
        with_weights: False downloads everything but the weights of a hub name.

    Raises:
        ModelNotHereError: the model must be downloaded or converted first, which is not allowed or fails now.
        ModelError: `model` is none of the four, or is incomplete; the message says what to do.
        ConfigError: a revision is given for a model that is not on a hub.
    """
    path = Path(model).expanduser()
    on_hub = model not in BUILTIN_MODELS and not path.exists() and bool(HUB_NAME.fullmatch(model))
    if revision is not None and not on_hub:
        raise ConfigError(
            f"--revision is for names on a hub (org/name, {MODELSCOPE}org/name), and --model is {model!r}"
        )
    if model in BUILTIN_MODELS:
        from minisgl.weights.pull import is_complete, pull  # lazy: few starts need it

        folder = builtin_folder(model, cache_dir or default_cache_dir())
        if not is_complete(folder, BUILTIN_MODELS[model]):
            if not pull_missing:
                raise ModelNotHereError(
                    f"the model {model} is not on this machine yet; run: minisgl pull {model}"
                )
            folder = pull(model, cache_dir=cache_dir or default_cache_dir(), progress=progress)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} has no config.json, so it holds no Hugging Face model")
        folder = path
    elif path.suffix == ".gguf" and path.is_file():
        from minisgl.weights.gguf_source import gguf_folder  # lazy: gguf loads slowly

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
    """The folder of `--tokenizer`.

    Raises:
        ModelError: the folder has no tokenizer.json.
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
    """A folder of links to the model's files and to the other folder's tokenizer files.

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
                if not place.is_dir():  # else another process has made the same links
                    raise
    except OSError as error:
        raise ModelError(f"can't make {place}: {error.strerror or error}") from error
    return place


def _hub_folder(model: str, revision: str | None, pull_missing: bool, files: list[str]) -> Path:
    """Download the `files` (patterns) of `model` from its hub, or find them in the hub's own cache.

    Raises:
        ModelError: the hub does not know the model, denies access, or can't be reached without a cached copy.
    """
    if model.startswith(MODELSCOPE):
        return _from_modelscope(model, revision, pull_missing, files)
    return _from_hugging_face(model, revision, pull_missing, files)


def _from_hugging_face(model: str, revision: str | None, pull_missing: bool, files: list[str]) -> Path:
    """`_hub_folder` for this hub."""
    # Lazy: the hub's client is slow to import, and most runs don't need it.
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
    except Exception as error:  # network errors, whose classes depend on the hub client's HTTP library
        raise _unreachable(model, "the Hugging Face hub", error) from error
    return Path(found)


def _from_modelscope(model: str, revision: str | None, pull_missing: bool, files: list[str]) -> Path:
    """`_hub_folder` for this hub."""
    try:
        # Lazy: an optional dependency.
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


def _unreachable(model: str, hub: str, error: BaseException) -> ModelNotHereError:
    return ModelNotHereError(
        f"can't fetch {model} from {hub} ({_first_line(error)}) and this machine's cache of it lacks the "
        f"model; check the network, give --model a local folder, or use a built-in one "
        f"({', '.join(BUILTIN_MODELS)})"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
