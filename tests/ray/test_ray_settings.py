"""The arguments of `minisgl.ray_serve:app`, without Ray: what becomes of each, and which are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from minisgl.commands.parser import build_parser
from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import ConfigError
from minisgl.ray.settings import OF_BOTH, REFUSED, RayConfig, flags_of, settings_from

ROOT = Path(__file__).resolve().parent.parent.parent


def test_texts_and_values_mean_the_same() -> None:
    texts = {"model": "org/name", "tp": "2", "prefix_cache": "false", "memory-fraction": "0.5"}
    values: dict[str, Any] = {"model": "org/name", "tp": 2, "prefix_cache": False, "memory_fraction": 0.5}
    assert settings_from(texts) == settings_from(values)
    assert settings_from(values).engine == EngineConfig(
        model="org/name", tp=2, prefix_cache=False, memory_fraction=0.5
    )


def test_the_server_gets_its_own_and_what_it_shares_with_the_engines() -> None:
    settings = settings_from(
        {"model": "org/name", "seed": 3, "tp": 2, "api_key": ["first", "--second"], "drain_timeout_s": 9}
    )
    assert settings.server == ServerConfig(api_key=("first", "--second"), drain_timeout_s=9.0)
    both = {"--drain-timeout-s=9.0", "--model=org/name"}
    assert set(settings.server_flags) == both | {"--api-key=first", "--api-key=--second", "--seed=3"}
    assert set(settings.engine_flags) == both | {"--log-level=info", "--tp=2"}
    assert settings.num_gpus == 2


def test_both_command_lines_parse() -> None:
    settings = settings_from(
        {"model": "-odd", "join_decodes": "no", "kernel": ["a=b:c"], "cors_origin": "*", "access_log": "true"}
    )
    parser = build_parser({})
    server = parser.parse_args(["serve", *settings.server_flags])
    assert (server.model, server.cors_origin, server.access_log) == ("-odd", ["*"], True)
    engine = parser.parse_args(["engine", "--server=-", *settings.engine_flags])
    assert (engine.model, engine.join_decodes, engine.kernel) == ("-odd", False, ["a=b:c"])


def test_ray_is_asked_for_the_gpus_of_an_engine_on_one_node() -> None:
    resources = settings_from({"tp": 4, "engine_cpus": 8}).engine_resources
    assert resources == {
        "ray_actor_options": {"num_cpus": 8.0, "num_gpus": 4},
        "placement_group_bundles": [{"CPU": 8.0, "GPU": 4}],
        "placement_group_strategy": "STRICT_PACK",
    }


def test_on_a_cpu_no_gpu_is_asked_for() -> None:
    resources = settings_from({"device": "cpu", "tp": 4}).engine_resources
    assert resources["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0}
    assert resources["placement_group_bundles"] == [{"CPU": 1.0}]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_go_with_ray_serve_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not go with Ray Serve: "):
        settings_from({name: "1"})


def test_what_is_refused_or_shared_exists() -> None:
    fields = {**ServerConfig.__dataclass_fields__, **EngineConfig.__dataclass_fields__}
    assert set(REFUSED) | set(OF_BOTH) <= fields.keys()
    assert not (RayConfig.__dataclass_fields__.keys() & fields.keys())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_replica": 2}, "did you mean max_replicas"),
        ({"what": 2}, "there is no argument 'what'"),
        ({"tp": "two"}, "tp must be a number, got 'two'"),
        ({"prefix_cache": "maybe"}, "prefix_cache must be one of"),
        ({"memory_fraction": 3}, "memory-fraction"),
        ({"min_replicas": 0}, "min-replicas must be between 1 and 64"),
        ({"min_replicas": 3, "max_replicas": 2}, r"max-replicas must be between min_replicas \(3\) and 64"),
        ({"look_back_s": 10}, "look-back-s must be above 10"),
        ({"target_use": 0}, "target-use must be above 0"),
        ({"max_surge_percent": 200}, "max-surge-percent must be between 0 and 100"),
        ({"drain_timeout_s": -1}, "drain-timeout-s"),
    ],
)
def test_a_mistake_is_refused_before_ray_hears_of_it(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        settings_from(arguments)


def test_defaults_make_no_words() -> None:
    assert flags_of(EngineConfig, {"revision": None}) == []
    assert settings_from({}).server_flags == []


@pytest.mark.parametrize("file", ["docs/ray/serve.yaml", "docs/ray/kuberay.yaml"])
def test_the_arguments_in_the_documents_are_accepted(file: str) -> None:
    content = next(yaml.safe_load_all((ROOT / file).read_text()))
    if "spec" in content:
        content = yaml.safe_load(content["spec"]["serveConfigV2"])
    for application in content["applications"]:
        assert application["import_path"] == "minisgl.ray_serve:app"
        settings_from(application["args"])
