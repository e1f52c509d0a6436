"""docs/grafana/minisgl.json: Grafana can place its panels, and a server has every figure in its queries."""

import hashlib
import json
import re
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import LIMIT_S, RunningServer
from small_model import make_folder

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
DASHBOARD = json.loads((DOCS / "grafana/minisgl.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
NAME = re.compile(r"minisgl:\w+")
SCRAPER_LABELS = {"instance", "job"}
"""Prometheus adds them."""
WITH_WINDOWS = {"minisgl:kv_window_pages"}
"""Figures of models whose windows give pages back, which this one lacks; see test_endpoints.py."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two engines"])
def labels(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """The samples of /metrics by name: the labels that they have, and the values of the label `kind`."""
    place = tmp_path_factory.mktemp("dashboard")
    entry = {"name": "alice", "key_sha256": hashlib.sha256(b"key").hexdigest(), "requests_per_minute": 1}
    keys = place / "keys.jsonl"
    keys.write_text(json.dumps(entry))
    with RunningServer(
        make_folder(place / "model"), api_keys_file=str(keys), replicas=request.param
    ) as server:
        client = server.ready().client().with_options(api_key="key")
        client.completions.create(model="tiny", prompt="@say a b")
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="@say a b")
        with urllib.request.urlopen(server.url("/metrics"), timeout=LIMIT_S) as answer:
            text = answer.read().decode()
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
            if "kind" in sample.labels:
                found[sample.name].add(f'kind="{sample.labels["kind"]}"')
    return found


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], int] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["w"] > 0
        assert place["h"] > 0
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"], panel["title"]


def test_it_can_be_imported_for_any_data_source() -> None:
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "minisgl"
    assert DASHBOARD["schemaVersion"] <= 38, "Grafana 10 knows no later one"
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {"model", "instance"} < variables.keys()
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used <= variables.keys() | {"__rate_interval", "__all"}
    sources = [
        part["datasource"]
        for panel in PANELS
        for part in (panel, *panel.get("targets", []))
        if "datasource" in part
    ]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert [panel["title"] for panel in PANELS if panel["type"] == "row"] == [
        "Traffic",
        "Latency",
        "Engine",
        "API keys",
    ]


def test_every_figure_in_its_queries_is_in_metrics(labels: dict[str, set[str]]) -> None:
    queries = QUERIES + [one["query"]["query"] for one in DASHBOARD["templating"]["list"][1:]]
    names = {name for query in queries for name in NAME.findall(query)}
    assert len(names) > 25
    assert names - labels.keys() == set()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_uses_labels_that_the_figure_has(labels: dict[str, set[str]], query: str) -> None:
    assert query.count("(") == query.count(")")
    for part in query.split(" / "):
        (name,) = NAME.findall(part)
        used = set(re.findall(r"(\w+)=~", part)) | set(re.findall(r'\w+="\w+"', part))
        for group in re.findall(r"by \(([\w, ]+)\)", part):
            used |= set(group.split(", "))
        assert used - SCRAPER_LABELS - labels[name] == set()
        assert ("rate(" in part or "increase(" in part) == name.endswith(("_total", "_bucket"))
        assert ("histogram_quantile" in part) == name.endswith("_bucket")


def test_every_figure_that_the_documentation_names_is_in_metrics(labels: dict[str, set[str]]) -> None:
    named = set(NAME.findall((DOCS / "monitoring.md").read_text(encoding="utf-8")))
    histograms = {name.removesuffix("_bucket") for name in labels}
    assert named - labels.keys() - histograms == WITH_WINDOWS
    everything = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in labels}
    assert {name for name in everything if name.startswith("minisgl:")} - named == set()
