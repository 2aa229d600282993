"""Tables from files, and their columns as numbers."""

import codecs
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError, DataError

MAX_CATEGORIES = 100


def read_table(file: Path) -> dict[str, Any]:
    """Arrow columns of a CSV, TSV or Parquet file by name; `values_of` turns one into numpy.

    Raises DataError for a file that cannot be read, has no rows, or has two columns of one name.
    """
    import pyarrow as pa  # 0.3 s, and only this task needs it
    from pyarrow import csv, parquet

    kind = file.suffix.lower()
    try:
        if kind in (".parquet", ".pq"):
            table = parquet.read_table(file)
        elif kind in (".csv", ".tsv", ".txt"):
            separator = "\t" if kind == ".tsv" else ","
            _check_text(file, separator)
            parse = csv.ParseOptions(delimiter=separator)
            table = csv.read_csv(
                file, parse_options=parse, convert_options=csv.ConvertOptions(strings_can_be_null=True)
            )
        else:
            raise DataError(f"{file}: tables are read from .csv, .tsv or .parquet files")
        names: list[str] = table.column_names
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"cannot read the table {file}: {error}") from None
    if table.num_rows == 0:
        raise DataError(f"{file} has no rows")
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{file} has two columns named {name!r}: rename one")
    return dict(zip(names, table.columns, strict=True))


def _check_text(file: Path, separator: str) -> None:
    """Raise DataError for what a spreadsheet may write and the reader would take for a table of one column."""
    with file.open("rb") as stream:
        header = stream.readline(1 << 16)
    if header.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in header[:4]:
        raise DataError(f"{file} is UTF-16 or binary: save it as UTF-8")
    if separator.encode() in header:
        return
    for other, name in ((b";", "semicolons"), (b"\t", "tabs"), (b",", "commas")):
        if other in header:
            raise DataError(
                f"{file} is separated by {name}, it seems: save it separated by commas as .csv (or by tabs as .tsv), "
                "with points in decimal numbers"
            )


def values_of(column: Any, where: str, exact: bool = False) -> NDArray[np.generic]:
    """An Arrow column as float64[N] with NaN for missing numbers, or as objects[N] (text, None where missing).

    exact: whole numbers become text too, as classes and clients need (no digit is lost). Raises DataError naming the
    column for a kind of value that is neither, and for dates, unless exact.
    """
    import pyarrow as pa

    kind = column.type
    whole = pa.types.is_integer(kind)
    if pa.types.is_temporal(kind) and not exact:
        raise DataError(
            f"{where} holds dates or times ({kind}): make it a number (days since ..., say), "
            "or leave it out with features"
        )
    try:
        if not (whole and exact) and (whole or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            return column.cast(pa.float64(), safe=False).to_numpy()
        return np.array(column.cast(pa.string()).to_pylist(), dtype=object)
    except pa.ArrowNotImplementedError:
        raise DataError(
            f"{where} holds {kind}: only numbers and text can be used, leave it out with features"
        ) from None
    except pa.ArrowInvalid as error:
        remedy = "save the file as UTF-8" if pa.types.is_binary(kind) else "leave it out with features"
        raise DataError(f"{where} cannot be read as numbers or text: {error}: {remedy}") from None


def encode_column(values: NDArray[np.generic], where: str, scale: list[float] | None = None) -> NDArray[np.float32]:
    """A column as float32[N, K]: a number standardised, text one-hot; then a flag where values are missing, if any are.

    scale: [centre, width] for a number; default its mean and deviation. Raises DataError naming the column, ConfigError
    for a scale that does not fit.
    """
    if values.dtype.kind == "f":
        return _encode_numbers(values.astype(np.float64), where, scale)
    missing = np.array([value is None for value in values])
    if missing.all():
        raise DataError(f"{where} is empty in every record: leave it out with features")
    _refuse_numbers_with_strays(values, where)
    if scale is not None:
        raise ConfigError(f"{where} is text: it has no scale")
    names = sorted({str(value) for value in values if value is not None})
    if len(names) > MAX_CATEGORIES:
        raise DataError(f"{where} has {len(names)} different texts: leave it out with features, or group its values")
    parts = [(values == name).astype(np.float32) for name in names]
    return np.stack([*parts, *([missing.astype(np.float32)] if missing.any() else [])], axis=1)


def _refuse_numbers_with_strays(values: NDArray[np.generic], where: str) -> None:
    """A "?" among measurements makes a column text, and would turn every number into a category of its own."""
    strays = [row for row, value in enumerate(values) if value is not None and not _is_number(value)]
    numbers = {str(value) for value in values if value is not None and _is_number(value)}
    if strays and len(numbers) >= 10 and len(strays) * 9 <= len(values):
        raise DataError(
            f"{where}: record {strays[0] + 1} is {str(values[strays[0]])!r} where all but {len(strays)} of "
            f"{len(values)} records are numbers or empty: mend it, leave the cell empty if the value is missing, "
            "or put a letter before codes that are no numbers"
        )


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _encode_numbers(values: NDArray[np.float64], where: str, scale: list[float] | None) -> NDArray[np.float32]:
    missing = np.isnan(values)
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        raise DataError(f"{where}: record {infinite[0] + 1} is infinite: mend or drop that record")
    if missing.all():
        raise DataError(f"{where} is empty in every record: leave it out with features")
    if scale is not None and (len(scale) != 2 or not all(map(math.isfinite, scale)) or not scale[1] > 0):
        raise ConfigError(f"{where}: scale = {scale}: write [centre, width] with a width above 0")
    with np.errstate(over="ignore", invalid="ignore"):
        centre, width = scale if scale is not None else (float(values[~missing].mean()), float(values[~missing].std()))
        scaled = np.where(missing, 0.0, (values - centre) / (width or 1.0)).astype(np.float32)
    if not (math.isfinite(width) and np.isfinite(scaled).all()):
        row = int(np.nanargmax(np.abs(values))) + 1
        raise DataError(
            f"{where}: record {row} is {values[row - 1]:g}, too large: mend it or declare a scale that fits"
        )
    return np.stack([scaled, *([missing.astype(np.float32)] if missing.any() else [])], axis=1)
