"""The server process's view of the model: name, tokenizer, chat template, sampling defaults.

Promise: read once from the model folder, without torch, and never changed afterwards.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.errors import ModelError, RequestError
from minisgl.fields import convert
from minisgl.server.sampling_fields import SamplingDefaults, given_fields
from minisgl.text.chat_template import ChatTemplate
from minisgl.text.tokenizer import Tokenizer, read_json


class ServedModel(NamedTuple):
    """The model that the API serves."""

    name: str
    created: int  # Unix time, seconds
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: dict[str, Any]  # sampling fields that hold where a call leaves them out

    def check_name(self, name: str | None) -> None:
        """Refuse calls that name another model. None = the call names no model.

        Raises:
            RequestError: 404 if `name` is another model's.
        """
        if name is not None and name != self.name:
            raise RequestError(
                404, "model_not_found", f"there is no model {name[:100]!r}; this is {self.name!r}", "model"
            )


def load_served_model(folder: Path, name: str, sampling_defaults: str = "model") -> ServedModel:
    """Read tokenizer and chat template, and generation_config.json if `sampling_defaults` is "model".

    Raises:
        ModelError: the folder lacks a tokenizer, or one of its files is broken.
    """
    tokenizer = Tokenizer.from_folder(folder)
    return ServedModel(
        name=name,
        created=int(time.time()),
        tokenizer=tokenizer,
        template=ChatTemplate.from_folder(folder, tokenizer),
        defaults=_read_defaults(folder / "generation_config.json") if sampling_defaults == "model" else {},
    )


def served_name(chosen: str | None, model: str) -> str:
    """The model name that clients send: `chosen`, else --model; for a local path, its last part."""
    if chosen:
        return chosen
    local = Path(model).expanduser()
    if local.is_file():
        return local.stem
    return local.resolve().name if local.is_dir() else model


def _read_defaults(file: Path) -> dict[str, Any]:
    try:
        return given_fields(convert(read_json(file), SamplingDefaults))
    except RequestError as error:
        raise ModelError(f"{file}: {error}") from None
