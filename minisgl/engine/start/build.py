"""Builds an engine that is ready to serve from settings and a model folder, for one rank or several.

Promise: a mistake in the settings raises a ConfigError that says what to change. A failed start leaves no
process behind.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from minisgl.attention.choice import TRITON, reason_unavailable
from minisgl.config import (
    ChosenSetting,
    DeviceFacts,
    EngineConfig,
    ResolvedConfig,
    attention_environment,
    chosen_settings,
    resolve_engine_config,
)
from minisgl.engine.engine import Engine
from minisgl.engine.ranks.job import Job
from minisgl.engine.start.build_rank import Rendezvous, build_rank
from minisgl.engine.start.device import find_device_facts
from minisgl.engine.start.startup_stages import OnStage, StartupStages
from minisgl.errors import ConfigError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.parallel.sizes import rank_sizes

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    folder: Path,
    on_stage: OnStage,
    *,
    ipc_dir: Path | None = None,
    on_lost_rank: Callable[[str, bool], None] = lambda reason, is_device_fault: None,
    max_queued_grammars: int | None = None,
    job: Job | None = None,
) -> Engine:
    """Build an engine that is ready to serve the model in `folder`, and report each stage to `on_stage`.

    If `config.tp` is above 1, the engine starts the other ranks' processes, and `close` ends them.

    Args:
        ipc_dir: a private directory for the ranks' sockets, which the caller removes. None: the engine makes
            and removes one.
        on_lost_rank: called with the reason, and whether it is a GPU fault, from another thread, when a rank
            has ended. The next `step` raises. A `step` that is running may hang until this process ends.
        max_queued_grammars: grammars that may wait to be compiled; a request with one more gets a 429. None:
            any number, for callers who send only their own requests.
        job: torchrun has started the other ranks; this process is rank 0.

    Raises:
        ConfigError: a setting is impossible, or there is too little memory.
        ModelError: the folder's model can't be loaded.
        DeviceFaultError: the GPU failed, or another rank's.
        EngineDeadError: another rank could not start.
    """
    stages = StartupStages(on_stage)
    model_config = read_model_config(folder, config.quantization, config.kv_dtype)
    facts = find_device_facts()
    resolved = resolve_engine_config(config, model_config, facts)
    if job is not None:
        resolved = replace(resolved, ranks_per_host=job.ranks_per_host)
    _warn_of_slower_attention(config, resolved, model_config, facts)
    if resolved.tp == 1:
        return build_rank(resolved, folder, model_config, stages, None, None, max_queued_grammars)
    _check_ranks_fit(resolved, model_config)
    # Lazy: importing torch.distributed is slow, and one rank does not need it.
    from minisgl.engine.ranks.follower_link import FollowerLink

    followers = FollowerLink(resolved, folder, ipc_dir=ipc_dir, on_lost=on_lost_rank, job=job)
    rendezvous = Rendezvous(0, followers.store, followers.wait_for_all)
    try:
        return build_rank(resolved, folder, model_config, stages, rendezvous, followers, max_queued_grammars)
    except BaseException as error:
        cause = followers.cause_of(error) if isinstance(error, Exception) else error
        followers.close()
        raise cause from (error if cause is not error else None)


def resolve_for_folder(config: EngineConfig, folder: Path) -> ResolvedConfig:
    """The settings that `build_engine` would use on this machine.

    Raises:
        ConfigError, ModelError: as in `build_engine`.
    """
    return resolve_engine_config(
        config, read_model_config(folder, config.quantization, config.kv_dtype), find_device_facts()
    )


def reasons_for_settings(config: EngineConfig, resolved: ResolvedConfig, folder: Path) -> list[ChosenSetting]:
    """The settings of an engine that was built of `config`, and why it has them."""
    model_config = read_model_config(folder, config.quantization, config.kv_dtype)
    return chosen_settings(config, resolved, model_config, find_device_facts())


def build_follower(config: ResolvedConfig, folder: Path, rendezvous: Rendezvous, on_stage: OnStage) -> Engine:
    """Build the engine of a rank above 0. Its `follow` executes rank 0's plans; its scheduler stays unused.

    Args:
        config: the same as rank 0's.

    Raises:
        MinisglError: as in `build_engine`.
    """
    model_config = read_model_config(folder, config.quantization, config.kv_dtype)
    return build_rank(config, folder, model_config, StartupStages(on_stage), rendezvous, None)


def _warn_of_slower_attention(
    config: EngineConfig, resolved: ResolvedConfig, model_config: ModelConfig, facts: DeviceFacts
) -> None:
    """Warn if the automatic choice on a GPU is not the usual attention backend."""
    if config.attention_backend is not None or resolved.device != "cuda":
        return
    place = attention_environment(
        model_config,
        facts,
        device="cuda",
        dtype=resolved.dtype,
        page_size=resolved.page_size,
        kv_dtype=resolved.kv_dtype,
    )
    reason = reason_unavailable(TRITON, place)
    if reason is not None:
        logger.warning(
            "attention runs on %s, because %s %s; 'minisgl doctor' lists what else there is",
            resolved.attention_backend,
            TRITON,
            reason,
        )


def _check_ranks_fit(config: ResolvedConfig, model_config: ModelConfig) -> None:
    rank_sizes(model_config, config.tp)
    needed, there = config.ranks_per_host, torch.cuda.device_count()
    if config.device == "cuda" and there < needed:
        raise ConfigError(f"--tp {config.tp} needs {needed} GPUs here and torch sees {there}; lower it")
