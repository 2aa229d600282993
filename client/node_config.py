"""What a node knows about itself and its server: a directory with ``node.toml``, its key and the server's CA."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomli_w
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.core.errors import ConfigError
from coterie.core.run_config import ChoiceField


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OwnTask(_Section):
    """A task that this site takes part in, with its own records."""

    task: ChoiceField = Field(description="a task's name or package.module:function, with its options")
    client: str | None = Field(default=None, description="use only the task's records with this client key")


class NodeConfig(_Section):
    """``node.toml``. tasks: by the name that runs ask for."""

    name: str
    server: str = Field(description="https://HOST:PORT")
    tasks: Mapping[str, OwnTask] = Field(default_factory=dict[str, OwnTask])

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return urlsplit(self.server).netloc

    @property
    def insecure(self) -> bool:
        return urlsplit(self.server).scheme == "http"


class NodeDirectory:
    """Where a node's files lie."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def ca(self) -> Path:
        return self.path / "ca.pem"

    @property
    def key_file(self) -> Path:
        return self.path / "node.key"

    @property
    def log(self) -> Path:
        return self.path / "worker.log"

    def config(self) -> NodeConfig:
        """Read ``node.toml``. Raises ConfigError."""
        path = self.path / "node.toml"
        try:
            return NodeConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}: `coterie client join` makes one") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {key} = {first['input']!r}: {first['msg']}") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None

    def write(self, config: NodeConfig) -> None:
        """Write ``node.toml``."""
        text = tomli_w.dumps(config.model_dump(exclude_none=True))
        (self.path / "node.toml").write_text(text, encoding="utf-8")

    def key(self) -> ec.EllipticCurvePrivateKey:
        """The node's private key, made here when there is none. It never leaves this machine."""
        try:
            data = self.key_file.read_bytes()
        except FileNotFoundError:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = ec.generate_private_key(ec.SECP384R1())
            data = made.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            with open(os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
                file.write(data)
        key: Any = serialization.load_pem_private_key(data, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{self.key_file} is no elliptic-curve key: remove it and join again")
        return key


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key as PEM."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


__all__ = ["NodeConfig", "NodeDirectory", "OwnTask", "public_pem"]
