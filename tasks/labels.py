"""Class labels and client keys from a user's values: missing ones are named, whole numbers keep their digits."""

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import DataError

MAX_CLASSES = 1000
EXACT = 2**53
"""Whole numbers up to here are exact in float64."""


def encode_labels(values: NDArray[np.generic], where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class labels 0 .. C-1 and the names of the classes, in sorted order (whole numbers by size).

    values: array[N] of text, whole numbers or booleans. where: what they are, for the error's text. Raises DataError
    naming the record: a missing label, a fraction, one class only, a class with a single record, or so many classes
    that it looks like a measurement.
    """
    values = _one_per_record(values, where, "class labels")
    missing = _missing(values)
    if len(missing):
        rows = ", ".join(str(row + 1) for row in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DataError(
            f"{where}: {len(missing)} labels are missing (record {rows}): fill them in or drop those records"
        )
    texts = _texts(values)
    if texts is None:
        raise DataError(f"{where} holds fractions: it looks like a measurement, these tasks need a class")
    names, labels, counts = np.unique(texts, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise DataError(f"{where} has only the class {str(names[0])!r}: at least two are needed")
    if len(names) > min(MAX_CLASSES, len(values) // 2):
        raise DataError(f"{where} has {len(names)} different values in {len(values)} records: is it the right column?")
    if counts.min() < 2:
        name = str(names[counts.argmin()])
        row = int(np.flatnonzero(texts == name)[0]) + 1
        raise DataError(
            f"{where}: class {name!r} has a single record (record {row}): two are needed to hold one out: "
            "drop it or join it with another class"
        )
    order = sorted(range(len(names)), key=lambda i: (0, int(names[i]), "") if _is_whole(names[i]) else (1, 0, names[i]))
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return rank[labels], tuple(str(names[i]) for i in order)


def encode_clients(values: NDArray[np.generic], where: str) -> NDArray[np.str_]:
    """The client key of each record as text. values: array[N].

    Raises DataError naming a record that has none, or one with a NUL character.
    """
    values = _one_per_record(values, where, "client keys")
    missing = _missing(values)
    if len(missing):
        raise DataError(f"{where}: record {missing[0] + 1} has no client: fill it in or drop that record")
    texts = _texts(values)
    if texts is None:
        raise DataError(f"{where} holds fractions: a client is named by text or a whole number")
    return texts


def _one_per_record(values: NDArray[np.generic], where: str, what: str) -> NDArray[np.generic]:
    if values.ndim != 1:
        raise DataError(f"{where} has shape {list(values.shape)}: {what} are one value per record")
    if values.dtype.kind not in "OSUbiuf":
        raise DataError(f"{where} is {values.dtype}: {what} are text or whole numbers")
    # numpy cuts these off at the end of a text: two values would become one.
    for row, value in enumerate(values.tolist()):
        if isinstance(value, str) and "\0" in value:
            raise DataError(f"{where}: record {row + 1} is {value!r}, which holds a NUL character: take it out")
    return values


def _missing(values: NDArray[np.generic]) -> NDArray[np.intp]:
    """Records with nothing, NaN or blank text."""
    return np.flatnonzero(
        [value is None or value != value or (isinstance(value, str) and not value.strip()) for value in values.tolist()]
    )


def _texts(values: NDArray[np.generic]) -> NDArray[np.str_] | None:
    """As text, 2.0 as "2"; None when there are numbers that are not whole (or too large to be told apart)."""
    if values.dtype.kind == "f":
        numbers = values.astype(np.float64)
        if not ((numbers == np.round(numbers)) & (np.abs(numbers) < EXACT)).all():
            return None
        values = numbers.astype(np.int64)
    return values.astype(str)


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
