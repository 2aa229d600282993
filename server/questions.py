"""What is asked of a real client and what it answers: the plain values of a message, whatever carries it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import tomli_w
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.core.messages import Evaluation, Failure, Purpose, Request, Update
from coterie.core.run_config import RunConfig

Result = Update | Evaluation | Failure


def question(run_id: str, config: RunConfig, request: Request) -> dict[str, str | int | float]:
    """What a client must know beside the model. It names settings, never code."""
    return {
        "run": run_id,
        "round": request.round,
        "version": request.version,
        "task": config.task.name,
        "local": tomli_w.dumps(config.local.model_dump(exclude_none=True)),
        "rounds": config.rounds,
        "seed": config.seed,
        "client_holdout": config.evaluation.client_holdout,
    }


def result(request: Request, record: Mapping[str, Any], error: str, delta: Callable[[], Tensor]) -> Result:
    """A client's answer, which may hold anything.

    error: why there is no record, or empty. delta: reads the update; may raise what a wrong one raises.
    """
    name, round = request.client_id, request.round
    if error:
        return Failure(name, round, "lost", error)
    if "failure" in record:
        return Failure(name, round, str(record["failure"])[:40], str(record.get("reason", ""))[:1000])
    try:
        metrics: Any = json.loads(str(record.get("metrics", "{}")))
        count: Any = record["num_examples"]
        if not isinstance(metrics, dict):
            raise ValueError("its metrics are no object")
        if request.purpose is Purpose.EVALUATE:
            return Evaluation(name, round, int(count), metrics)
        change = delta()
    except (CoterieError, KeyError, TypeError, ValueError, OSError) as wrong:
        return Failure(name, round, "malformed", f"its answer cannot be read: {type(wrong).__name__}: {wrong}")
    version: Any = record.get("version")
    return Update(name, round, version, change, count, metrics)
