"""The ClientApp of a Coterie run under stock Flower; a stock supernode starts it in a new process for every message.

A Flower app names it as ``clientapp = "coterie.client.flower_app:app"``. What the site holds stands in the supernode's
``--node-config``, never in what a server sends:

    flower-supernode --node-config 'name="site-a" task="heart" client="cleveland"'

name: of this client. task: a task's name or package.module:function; its options are keys of their own, then with
``task.name`` for the name. client: only the task's records with this client key; default all.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.client.node_config import OwnTask
from coterie.client.node_worker import NodeWorker
from coterie.client.worker_main import describe
from coterie.core.errors import ConfigError
from coterie.core.flower_records import bytes_of, packed, raw, values_of
from coterie.core.run_config import ChoiceField

app = ClientApp()


class SiteConfig(BaseModel):
    """A supernode's ``--node-config``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="of this client")
    task: ChoiceField = Field(description="what this site takes part in, with its own records")
    client: str | None = Field(default=None, description="use only the task's records with this client key")


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who this site is and how many records of the task it holds."""

    def work(site: SiteConfig, worker: NodeWorker) -> RecordDict:
        task = str(values_of(message.content).get("task"))
        return packed({"name": site.name, "num_examples": worker.offers().get(task, 0)})

    return _answered(message, context, work)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the model in the message; the answer holds the update, raw little-endian float32[D]."""

    def work(_: SiteConfig, worker: NodeWorker) -> RecordDict:
        asked = values_of(message.content)
        with _model_of(message) as model:
            update = model.with_name("update")
            told = _told(worker.train(asked, str(model), str(update)))
            return packed(told | {"version": asked["version"]}, raw(update.read_bytes()))

    return _answered(message, context, work)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model in the message on this site's records."""

    def work(_: SiteConfig, worker: NodeWorker) -> RecordDict:
        with _model_of(message) as model:
            return packed(_told(worker.evaluate(values_of(message.content), str(model))))

    return _answered(message, context, work)


def site_of(node_config: Mapping[str, UserConfigValue]) -> SiteConfig:
    """What a supernode's configuration says. Raises ConfigError."""
    nested: dict[str, Any] = {}
    for key, value in node_config.items():  # Flower gives task.name and task.model as keys with a dot
        section, _, option = key.partition(".")
        if option:
            nested[section] = {**nested.get(section, {}), option: value}
        else:
            nested[section] = value
    try:
        return SiteConfig.model_validate(nested)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f'--node-config: {key}: {first["msg"]}: write it as \'name="site-a" task="heart" client="cleveland"\''
        ) from None


@contextlib.contextmanager
def _model_of(message: Message) -> Generator[Path]:
    """The model in a message as a file, for a while, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        path = Path(folder) / "model"
        path.write_bytes(bytes_of(message.content))
        yield path


def _answered(message: Message, context: Context, work: Callable[[SiteConfig, NodeWorker], RecordDict]) -> Message:
    """The answer to a message: what goes wrong here is told, and is a named failure of the round."""
    torch.set_num_threads(1)  # as in a simulation: the bits depend on it
    try:
        site = site_of(context.node_config)
        own = OwnTask(task=site.task, client=site.client)
        content = work(site, NodeWorker(site.name, {site.task.name: own}))
    except Exception as error:
        content = packed({"failure": "raised", "reason": describe(error)})
    return Message(content, reply_to=message)


def _told(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_examples": result["num_examples"], "metrics": json.dumps(result["metrics"])}
