"""The definition of a run: a TOML file in, the same file with every default visible out.

Unknown and contradictory keys are ConfigErrors that name the key, the value and what would be right. A strategy is a
name for three choices (local algorithm, aggregator, server optimizer): it fills those that the file leaves out, so that
strategies can be used by name or put together freely.
"""

import copy
import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from coterie.core.choice import Choice
from coterie.core.errors import ConfigError

DEFAULT_COHORT = 20

_MOST = 10**9
"""Rounds, clients, records: more than anyone has, and every counter behind them holds it."""

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    # McMahan et al. 2017, arXiv:1602.05629
    "fedavg": {
        "local.algorithm": {"name": "plain"},
        "aggregator": {"name": "mean"},
        "server_optimizer": {"name": "sgd"},
    },
    # Li et al. 2020, arXiv:1812.06127
    "fedprox": {
        "local.algorithm": {"name": "fedprox"},
        "aggregator": {"name": "mean"},
        "server_optimizer": {"name": "sgd"},
    },
    # Yin et al. 2018, arXiv:1803.01498; f is set from the cohort's size, see `RunConfig.resolve`
    "trimmed_mean": {
        "local.algorithm": {"name": "plain"},
        "aggregator": {"name": "trimmed_mean"},
        "server_optimizer": {"name": "sgd"},
    },
}


def _named(value: Any) -> Any:
    """Let a plain string stand for a choice without options."""
    return {"name": value} if isinstance(value, str) else value


ChoiceField = Annotated[Choice, BeforeValidator(_named)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class CohortConfig(_Section):
    """Who is asked in a round, and what is enough."""

    size: int | None = Field(
        default=None, ge=1, le=_MOST, description="clients asked in each round; default 20, or all when fewer"
    )
    min_replies: int | None = Field(
        default=None,
        ge=1,
        le=_MOST,
        examples=[10],
        description="usable replies a round needs (the quorum); default half the cohort",
    )
    over_selection: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="share of further clients asked; the round closes when cohort.size have answered",
    )
    deadline: float = Field(
        default=math.inf, gt=0, description="seconds after which a round closes; virtual seconds in a simulation"
    )
    max_empty_rounds: int = Field(
        default=3, ge=1, le=_MOST, description="rounds in a row below the quorum after which the run fails"
    )


class LocalConfig(_Section):
    """What a client does with its records in one round."""

    algorithm: ChoiceField | None = Field(
        default=None,
        examples=[{"name": "fedprox", "mu": 0.1}],
        description="plain or fedprox; from the strategy when not set",
    )
    optimizer: ChoiceField = Field(
        default=Choice(name="sgd"), description="sgd (momentum, nesterov, weight_decay) or adam"
    )
    lr: float = Field(default=0.1, gt=0, allow_inf_nan=False, description="learning rate")
    lr_schedule: ChoiceField = Field(
        default=Choice(name="constant"), description="constant, cosine, exponential or step, by round"
    )
    batch_size: int = Field(default=10, ge=1, le=_MOST, description="records per step")
    epochs: int | None = Field(
        default=None, ge=1, le=_MOST, examples=[5], description="passes over the client's records per round; default 5"
    )
    steps: int | None = Field(
        default=None, ge=1, le=_MOST, examples=[20], description="steps per round, instead of epochs"
    )
    clip_norm: float = Field(default=math.inf, gt=0, description="largest L2 norm of one step's gradient")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="bfloat16: autocast in forward and backward"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps")

    @model_validator(mode="after")
    def _one_length(self) -> "LocalConfig":
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs = {self.epochs} and steps = {self.steps} contradict each other: keep one of them")
        return self


class GateConfig(_Section):
    """What an update must satisfy before any aggregator sees it."""

    max_num_examples: int = Field(
        default=1_000_000, ge=1, le=_MOST, description="largest weight that a client may claim"
    )
    max_norm: float = Field(default=math.inf, gt=0, description="largest L2 norm of an update")


class EvaluationConfig(_Section):
    """When the global model is measured."""

    every: int = Field(
        default=1, ge=0, le=_MOST, description="rounds between evaluations on the held-out set; 0: only at the end"
    )
    clients_every: int = Field(
        default=0, ge=0, le=_MOST, description="rounds between evaluations on every client; 0: only at the end"
    )
    client_holdout: float = Field(
        default=0.0, ge=0, lt=1, description="share of each client's records kept from training to evaluate on"
    )


class CheckpointConfig(_Section):
    """When the run is made safe on disk."""

    every: int = Field(
        default=1,
        ge=1,
        le=_MOST,
        description="rounds between checkpoints; a slow disk makes them rarer, never the rounds slower",
    )


class SimulationConfig(_Section):
    """The stand-in for real clients."""

    clients: int | None = Field(
        default=None, ge=1, le=_MOST, description="number of clients; default 100, or the task's own number"
    )
    partition: ChoiceField | None = Field(
        default=None,
        examples=[{"name": "dirichlet", "alpha": 0.5}],
        description="natural, iid, dirichlet, shards or quantity; default natural, else dirichlet",
    )
    workers: int = Field(default=0, ge=0, le=1024, description="worker processes; 0: one per core")
    dropout: float = Field(default=0.0, ge=0, le=1, description="chance that a client vanishes in a round")
    slowness: ChoiceField = Field(
        default=Choice(name="uniform"), description="uniform, lognormal or stragglers: virtual speed of the clients"
    )
    seconds_per_example: float = Field(
        default=0.001,
        gt=0,
        allow_inf_nan=False,
        description="virtual seconds that a client of speed 1 needs per record and epoch",
    )
    attack: ChoiceField = Field(default=Choice(name="none"), description="none, sign_flip, gaussian, label_flip or nan")
    attackers: float | list[str] = Field(default=0.0, description="share of the clients that attack, or their ids")

    @model_validator(mode="after")
    def _attack(self) -> "SimulationConfig":
        share = self.attackers
        if isinstance(share, float) and not 0 <= share <= 1:
            raise ValueError(f"attackers = {share} is no share: give a number from 0 to 1, or a list of client ids")
        if share and self.attack.name == "none":
            raise ValueError(f"attackers = {share} without an attack: set attack, for example attack = 'sign_flip'")
        if not share and self.attack.name != "none":
            raise ValueError(
                f"attack = {self.attack.name!r} without attackers: set attackers, for example attackers = 0.1"
            )
        return self


class FederationConfig(_Section):
    """Real clients: what a run waits for before its first round."""

    min_clients: int | None = Field(
        default=None,
        ge=1,
        le=_MOST,
        examples=[4],
        description="nodes with records for the task that must be there; default cohort.size, or 1",
    )
    wait: float = Field(default=600.0, ge=0, description="seconds to wait for them before the run fails")
    tags: list[str] = Field(
        default=[], examples=[["eu", "gpu"]], description="ask only nodes that have all of these tags"
    )
    priority: int = Field(
        default=0, ge=-1000, le=1000, description="of the queued runs the one with the highest goes first"
    )


class RunConfig(_Section):
    """One run. `load` reads it from TOML, `to_toml` prints it back, `resolve` fills in what depends on the clients."""

    name: str = Field(default="", description="a label of your own")
    strategy: str = Field(
        default="fedavg", description="fedavg, fedprox or trimmed_mean: fills the choices that are not set"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="every random choice derives from it")
    rounds: int = Field(default=20, ge=1, le=_MOST, description="how many rounds")
    task: ChoiceField = Field(
        default=Choice(name="mnist"), description="a task's name or package.module:function, with its options"
    )
    cohort: CohortConfig = CohortConfig()
    local: LocalConfig = LocalConfig()
    aggregator: ChoiceField | None = Field(
        default=None,
        examples=[{"name": "trimmed_mean", "f": 2}],
        description="mean or trimmed_mean (f); from the strategy when not set",
    )
    server_optimizer: ChoiceField | None = Field(
        default=None,
        examples=[{"name": "sgd", "lr": 1.0, "momentum": 0.0}],
        description="sgd (lr, momentum); from the strategy when not set",
    )
    gate: GateConfig = GateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    simulation: SimulationConfig = SimulationConfig()
    federation: FederationConfig = FederationConfig()

    @field_validator("name")
    @classmethod
    def _text(cls, name: str) -> str:
        if name != name.encode("utf-8", "replace").decode():
            raise ValueError(f"name = {name!r} holds bytes that are no text: write it in UTF-8")
        return name

    @classmethod
    def load(cls, path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> "RunConfig":
        """Read a run file and lay `overrides` (dotted key to value) over it. Raises ConfigError."""
        data: dict[str, Any] = {}
        where = "the options"
        if path is not None:
            where = str(path)
            try:
                data = tomllib.loads(path.read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"cannot read the run file {path}: {error.strerror}") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path} is not valid TOML: {error}") from None
        return cls._overridden(data, overrides, where)

    @classmethod
    def from_toml(cls, text: str, where: str, overrides: Mapping[str, Any] | None = None) -> "RunConfig":
        """A run file's text, with `overrides` laid over it; `where` names it in errors."""
        return cls._overridden(tomllib.loads(text), overrides, where)

    @classmethod
    def _overridden(cls, data: dict[str, Any], overrides: Mapping[str, Any] | None, where: str) -> "RunConfig":
        old = data.get("strategy", "fedavg")
        if (overrides or {}).get("strategy", old) != old:
            # The file's choices are those of the strategy that is given up.
            for key in STRATEGIES["fedavg"]:
                _drop(data, key)
        for key, value in (overrides or {}).items():
            _set(data, key, value)
        return cls.from_dict(data, where)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the run") -> "RunConfig":
        """Check a run given as nested dictionaries. Raises ConfigError naming the first wrong key."""
        named = _with_names(data)
        try:
            config = cls.model_validate(named)
        except ValidationError as error:
            raise ConfigError(f"{where}: {_explain(error)}") from None
        if config.strategy not in STRATEGIES:
            raise ConfigError(f"{where}: strategy = {config.strategy!r}: choose one of {', '.join(sorted(STRATEGIES))}")
        return config

    def resolve(self, num_clients: int) -> "RunConfig":
        """Fill in what depends on the number of clients and on the strategy. Raises ConfigError."""
        data = self.to_dict()
        size = self.cohort.size or min(DEFAULT_COHORT, num_clients)
        if size > num_clients:
            raise ConfigError(
                f"cohort.size = {size} is more than the {num_clients} clients there are: "
                f"lower cohort.size or raise simulation.clients"
            )
        for key, value in STRATEGIES[self.strategy].items():
            if _get(data, key) is None:
                _set(data, key, dict(value))
        rule = data["aggregator"]
        if rule["name"] == "trimmed_mean" and "f" not in rule:
            rule["f"] = max(1, size // 4) if size > 2 else 0
        replies = self.cohort.min_replies or max(math.ceil(size / 2), min(size, 2 * rule.get("f", 0) + 1))
        if replies > size:
            raise ConfigError(
                f"cohort.min_replies = {replies} is more than cohort.size = {size}: lower it or raise cohort.size"
            )
        _set(data, "cohort.size", size)
        _set(data, "cohort.min_replies", replies)
        _set(data, "simulation.clients", num_clients)
        if self.local.steps is None and self.local.epochs is None:
            _set(data, "local.epochs", 5)
        return RunConfig.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries without the keys that are not set."""
        return self.model_dump(exclude_none=True)

    def to_toml(self) -> str:
        """The run file with every default visible; `load` reads it back equal."""
        return tomli_w.dumps(self.to_dict())


def _with_names(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options without a name (``local.algorithm = { mu = 0.01 }``) belong to the strategy's or the default choice."""
    names = {key: choice["name"] for key, choice in STRATEGIES.get(str(data.get("strategy", "fedavg")), {}).items()}
    names |= {"local.optimizer": "sgd", "local.lr_schedule": "constant", "simulation.slowness": "uniform"}
    full = copy.deepcopy(dict(data))
    for key, name in names.items():
        choice = _get(full, key)
        if isinstance(choice, dict) and "name" not in choice:
            _set(full, f"{key}.name", name)
    return full


def _explain(error: ValidationError) -> str:
    """The first mistake in one line: key, value, remedy."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "run"
    if first["type"] == "extra_forbidden":
        parent: Any = RunConfig
        for part in first["loc"][:-1]:
            parent = parent.model_fields[str(part)].annotation
        known = list(parent.model_fields)
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(known)}"
        return f"unknown key {key} = {first['input']!r}: {remedy}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key} = {first['input']!r}: {message}"


def _get(data: Mapping[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
    return value


def _drop(data: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    section: Any = data
    for part in parents:
        section = section.get(part) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.pop(last, None)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at a dotted key, making the sections on the way. A string choice on the way becomes a table."""
    *parents, last = key.split(".")
    for part in parents:
        child = data.get(part)
        if isinstance(child, str):
            child = {"name": child}
        data[part] = child = dict(cast("Mapping[str, Any]", child)) if isinstance(child, Mapping) else {}
        data = child
    data[last] = value
