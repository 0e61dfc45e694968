"""The dashboard and the alerts in deploy/ name only what the metrics have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from nostall import metrics

DEPLOY = Path(__file__).parents[3] / "deploy"
FUNCTIONS = {"rate", "increase", "sum", "max", "by", "without", "ignoring", "group_left", "and"}
VARIABLES = {"job", "__rate_interval"}


def served() -> set[str]:
    return set(re.findall(r"^# TYPE (\w+)", metrics.text(), re.MULTILINE))


def check(expression: str) -> set[str]:
    """The metrics that an expression of PromQL names; everything in it is known."""
    assert expression.count("(") == expression.count(")")
    for inside in re.findall(r"\{([^}]*)\}", expression):
        assert re.fullmatch(
            r'(?:(?:job|origin|loader|rank|pool)(?:=|=~|!~)"[$\w|]+",?)+', inside
        ), inside
    used = set(re.findall(r"\$(\w+)", expression))
    assert used <= VARIABLES, expression
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|(?:by|without|ignoring) ?\([^)]*\)", "", expression)
    names = set(re.findall(r"[a-z_]\w*", bare)) - FUNCTIONS
    assert names and names <= served(), (expression, names - served())
    # What only grows is looked at by its rate.
    counters = {name for name in names if name.endswith("_total")}
    assert all(re.search(rf"(?:rate|increase)\({name}\b", bare) for name in counters), expression
    return names


def test_the_dashboard_shows_what_is_served() -> None:
    board = json.loads((DEPLOY / "grafana" / "nostall.json").read_text())
    shown: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            shown |= check(target["expr"])
    assert shown >= served() - {"nostall_batches_total"}
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert {"datasource", "job"} == set(variables)
    (name,) = re.findall(r"nostall_\w+", variables["job"]["query"])
    assert name in served()
    places = [tuple(p["gridPos"][k] for k in "xy") for p in board["panels"]]
    assert len(set(places)) == len(places)


def test_alerts_are_of_what_is_served() -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "nostall-rules.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) == 3
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
        assert set(rule["annotations"]) == {"summary", "description"}
        check(rule["expr"])
        # A label that a sum leaves out is not there for its words.
        (left_out,) = re.findall(r"without \((\w+)\)", rule["expr"])[:1] or [None]
        assert left_out is None or f"$labels.{left_out}" not in rule["annotations"]["summary"]
