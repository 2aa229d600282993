"""How a question or an answer lies in a message of a Flower app: plain values, and one array of raw bytes beside them.

Public names of flwr only. Nothing here is pickled.
"""

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_VALUES = "coterie"
_BYTES = "bytes"


def packed(values: Mapping[str, Any], data: ArrayRecord | None = None) -> RecordDict:
    """A message's content. values: texts, numbers, booleans; data: see `raw`."""
    content = RecordDict({_VALUES: ConfigRecord(dict(values))})
    if data is not None:
        content[_BYTES] = data
    return content


def raw(data: bytes) -> ArrayRecord:
    """Bytes as a record. Many messages may hold the same one: it then travels to the SuperLink once."""
    return ArrayRecord({_BYTES: Array(dtype="uint8", shape=(len(data),), stype="raw", data=data)})


def values_of(content: RecordDict) -> dict[str, Any]:
    """The values of a message's content; none when it holds none of ours."""
    return dict(content.config_records.get(_VALUES, {}))


def bytes_of(content: RecordDict) -> bytes:
    """The bytes of a message's content. Raises ValueError when it holds none."""
    try:
        return content.array_records[_BYTES][_BYTES].data
    except KeyError:
        raise ValueError("the message holds no bytes") from None
