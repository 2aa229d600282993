"""What to call the runs of a comparison: by what differs between them, no longer than it takes to tell them apart."""

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.server.report_data import RunStory

_FIRST = ("name", "task.name", "strategy", "simulation.attack.name", "simulation.attackers")
"""Named whenever they differ. The rest of a run file is named only when these leave two runs alike."""

_NEXT = ("simulation.partition", "simulation.clients", "cohort.size", "simulation.dropout", "local", "seed")

_BARE = {"name", "strategy", "task.name"}
"""Keys whose values say what they are."""


def labels(stories: Sequence[RunStory]) -> list[str]:
    """A label for each run, all different."""
    if len(stories) == 1:
        return [stories[0].record.name or stories[0].record.strategy or stories[0].record.id]
    names = [story.record.name for story in stories]
    if all(names) and len(set(names)) == len(names):
        return names
    configs = [settings(story) for story in stories]
    chosen: list[str] = []
    for key in _in_order(differences(configs)):
        if key not in _FIRST and len(set(_labelled(configs, chosen))) == len(stories):
            break
        chosen.append(key)
    found = _labelled(configs, chosen)
    return [
        label if label and found.count(label) == 1 else " ".join(filter(None, (label, story.record.id)))
        for label, story in zip(found, stories, strict=True)
    ]


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted keys whose values differ between the runs, with the value of each run (None where it has none)."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return {
        key: [config.get(key) for config in configs]
        for key in keys
        if len({repr(config.get(key)) for config in configs}) > 1
    }


def settings(story: RunStory) -> dict[str, Any]:
    """A run file as dotted keys and values."""
    record = story.record
    return {"name": record.name, "task.name": record.task, "strategy": record.strategy} | _flat(story.config)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _in_order(keys: Mapping[str, Any]) -> list[str]:
    order = _FIRST + _NEXT

    def place(key: str) -> int:
        return next((i for i, first in enumerate(order) if key == first or key.startswith(f"{first}.")), len(order))

    return sorted(keys, key=place)


def _labelled(configs: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    return [", ".join(filter(None, (_said(key, config.get(key)) for key in keys))) for config in configs]


def _said(key: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if key in _BARE:
        return str(value)
    if key == "simulation.attack.name":
        return "no attack" if value == "none" else f"attack {value}"
    if key == "simulation.attackers":
        if isinstance(value, list):
            return f"{len(value)} attackers"
        return f"{value:.0%} attackers" if isinstance(value, float) and value else ""
    short = key.removeprefix("simulation.").removesuffix(".name")
    return f"{short} = {value}"
