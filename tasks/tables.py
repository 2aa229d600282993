"""Tables from files, and their columns as numbers."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import DataError

MAX_CATEGORIES = 100


def read_table(file: Path) -> dict[str, NDArray[np.generic]]:
    """Columns of a CSV or Parquet file by name: float64 with NaN for missing numbers, or objects with None for missing
    text.

    Raises DataError for a file that cannot be read or has no rows.
    """
    import pyarrow as pa  # 0.3 s, and only this task needs it
    from pyarrow import csv, parquet

    try:
        if file.suffix.lower() in (".parquet", ".pq"):
            table = parquet.read_table(file)
        elif file.suffix.lower() in (".csv", ".tsv", ".txt"):
            parse = csv.ParseOptions(delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
            table = csv.read_csv(
                file, parse_options=parse, convert_options=csv.ConvertOptions(strings_can_be_null=True)
            )
        else:
            raise DataError(f"{file}: tables are read from .csv, .tsv or .parquet files")
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot read the table {file}: {error}") from None
    if table.num_rows == 0:
        raise DataError(f"{file} has no rows")
    columns: dict[str, NDArray[np.generic]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name in columns:
            raise DataError(f"{file} has two columns named {name!r}: rename one")
        if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            columns[name] = column.cast(pa.float64()).to_numpy()
        else:
            columns[name] = np.array(column.cast(pa.string()).to_pylist(), dtype=object)
    return columns


def encode_column(values: NDArray[np.generic], where: str, scale: list[float] | None = None) -> NDArray[np.float32]:
    """A column as float32[N, K]: a number standardised, text one-hot; then a flag where values are missing, if any are.

    scale: [centre, width] for a number; default its mean and deviation. Raises DataError naming the column.
    """
    if values.dtype.kind == "f":
        return _encode_numbers(values.astype(np.float64), where, scale)
    missing = np.array([value is None for value in values])
    if missing.all():
        raise DataError(f"{where} is empty in every record: leave it out with features")
    names = sorted({str(value) for value in values if value is not None})
    if len(names) > MAX_CATEGORIES:
        raise DataError(f"{where} has {len(names)} different texts: leave it out with features, or group its values")
    parts = [(values == name).astype(np.float32) for name in names]
    return np.stack([*parts, *([missing.astype(np.float32)] if missing.any() else [])], axis=1)


def _encode_numbers(values: NDArray[np.float64], where: str, scale: list[float] | None) -> NDArray[np.float32]:
    missing = np.isnan(values)
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        raise DataError(f"{where}: record {infinite[0] + 1} is infinite: mend or drop that record")
    if missing.all():
        raise DataError(f"{where} is empty in every record: leave it out with features")
    if scale is not None and (len(scale) != 2 or not scale[1] > 0):
        raise DataError(f"{where}: scale = {scale}: write [centre, width] with a width above 0")
    centre, width = scale if scale is not None else (float(values[~missing].mean()), float(values[~missing].std()))
    scaled = np.where(missing, 0.0, (values - centre) / (width or 1.0)).astype(np.float32)
    return np.stack([scaled, *([missing.astype(np.float32)] if missing.any() else [])], axis=1)
