"""From settings and a model folder to an engine that is ready to serve, of one rank or of several.

Promise: a mistake in the settings is a ConfigError that says what to change; a start that fails leaves no
process behind.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from minisgl.attention_choice import TRITON, obstacle
from minisgl.config import (
    DeviceFacts,
    EngineConfig,
    ResolvedConfig,
    attention_place,
    resolve_engine_config,
)
from minisgl.engine.device import find_device_facts
from minisgl.engine.engine import Engine
from minisgl.engine.rank import Rendezvous, build_rank
from minisgl.engine.stages import OnStage, Stages
from minisgl.errors import ConfigError
from minisgl.hf_config import read_model_config
from minisgl.model_config import ModelConfig
from minisgl.parallel.sizes import rank_sizes

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    folder: Path,
    on_stage: OnStage,
    *,
    ipc_dir: Path | None = None,
    on_lost_rank: Callable[[str], None] = lambda reason: None,
) -> Engine:
    """An engine that is ready to serve the model in `folder`, all its stages reported to `on_stage`.

    With `config.tp` above 1 it starts the other ranks' processes, and ends them in `close`.

    Args:
        ipc_dir: a private directory for their sockets, which the caller removes; None = one of its own.
        on_lost_rank: called with the reason, from another thread, when a rank has ended; the next `step`
            raises, but this one may not return until its process ends.

    Raises:
        ConfigError: a setting is impossible, or memory does not suffice.
        ModelError: the folder's model can't be loaded.
        EngineDeadError: another rank could not start.
    """
    if config.node_rank:
        raise ConfigError(
            f"--node-rank {config.node_rank}: node 0 uses the engine; 'minisgl serve' with the same --model, "
            "--tp, --nnodes and --rdzv starts this host's ranks"
        )
    stages = Stages(on_stage)
    model_config = read_model_config(folder)
    facts = find_device_facts()
    resolved = resolve_engine_config(config, model_config, facts)
    _warn_of_slower_attention(config, resolved, model_config, facts)
    if resolved.tp == 1:
        return build_rank(resolved, folder, model_config, stages, None, None)
    _check_ranks_fit(resolved, model_config)
    # Lazy: torch.distributed takes a while, and one rank needs none of it.
    from minisgl.engine.follower_link import FollowerLink

    followers = FollowerLink(resolved, folder, ipc_dir=ipc_dir, on_lost=on_lost_rank)
    rendezvous = Rendezvous(0, followers.store, followers.wait_for_all)
    try:
        return build_rank(resolved, folder, model_config, stages, rendezvous, followers)
    except BaseException as error:
        cause = followers.explain(error) if isinstance(error, Exception) else error
        followers.close()
        raise cause from (error if cause is not error else None)


def build_follower(config: ResolvedConfig, folder: Path, rendezvous: Rendezvous, on_stage: OnStage) -> Engine:
    """A further rank's engine, whose `follow` executes rank 0's plans: its own scheduler is never asked.

    Args:
        config: as rank 0's.

    Raises:
        MinisglError: as `build_engine`.
    """
    return build_rank(config, folder, read_model_config(folder), Stages(on_stage), rendezvous, None)


def _warn_of_slower_attention(
    config: EngineConfig, resolved: ResolvedConfig, model_config: ModelConfig, facts: DeviceFacts
) -> None:
    """Say so where an auto choice on a GPU could not be the usual one."""
    if config.attention_backend is not None or resolved.device != "cuda":
        return
    place = attention_place(
        model_config, facts, device="cuda", dtype=resolved.dtype, page_size=resolved.page_size
    )
    reason = obstacle(TRITON, place)
    if reason is not None:
        logger.warning(
            "attention runs on %s, because %s %s; 'minisgl doctor' lists what else there is",
            resolved.attention_backend,
            TRITON,
            reason,
        )


def _check_ranks_fit(config: ResolvedConfig, model_config: ModelConfig) -> None:
    rank_sizes(model_config, config.tp)
    needed, there = config.ranks_per_node, torch.cuda.device_count()
    if config.device == "cuda" and there < needed:
        raise ConfigError(f"--tp {config.tp} needs {needed} GPUs here and torch sees {there}; lower it")
