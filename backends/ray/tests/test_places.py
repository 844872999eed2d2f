"""Which nodes may have an instance, without a cluster."""

import pytest

pytest.importorskip("ray")

from seer_ray import cluster, places
from seer_ray.settings import Settings


@pytest.mark.parametrize("label", ["infer", "in", "i"])
def test_a_label_that_begins_like_an_operator_is_compared(label, monkeypatch):
    node = {"NodeID": "n", "Resources": {"CPU": 4.0}, "Labels": {"for": "training"}}
    monkeypatch.setattr(cluster, "living_nodes", lambda: [node])
    assert places.lacking(Settings(labels={"for": "training"})) is None
    lack = places.lacking(Settings(labels={"for": label}))
    assert lack == f"none of the 1 nodes has the labels for={label}"


@pytest.mark.parametrize("selector", ["in(infer,train)", "!in(infer)", "!infer"])
def test_operators_of_label_selectors_are_left_to_ray(selector, monkeypatch):
    node = {"NodeID": "n", "Resources": {"CPU": 4.0}, "Labels": {"for": "training"}}
    monkeypatch.setattr(cluster, "living_nodes", lambda: [node])
    assert places.lacking(Settings(labels={"for": selector})) is None


def test_what_is_free_on_nodes_with_other_labels_is_not_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(places.ray, "available_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(places.ray, "cluster_resources", lambda: {"CPU": 8.0})
    settings = Settings(labels={"rack": "a"})
    assert places.shortage(settings) == "no single node with the labels rack=a has 1 CPU free"
    assert places.shortage(Settings(cpus=6)) == "6 CPU wanted, 4 of 8 free"
