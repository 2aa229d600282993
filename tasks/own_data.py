"""A user's own records with no code: a table (CSV, Parquet), arrays (NPZ) or a folder of images, for classification.

    coterie simulate --task table --set task.path=patients.csv --set task.target=ill --set task.client=hospital

Every mistake in the data is a DataError that names the file, the column and the row.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from coterie.core.errors import DataError
from coterie.tasks.image_folder import read_images
from coterie.tasks.metrics import accuracy, auc, balanced_accuracy
from coterie.tasks.models import FromBytes, cnn, linear, mlp
from coterie.tasks.splits import stratified_split
from coterie.tasks.tables import encode_column, read_table
from coterie.tasks.task import Metric, Records, Task

MAX_CLASSES = 1000


def table(
    path: str,
    target: str,
    client: str | None = None,
    features: list[str] | None = None,
    scale: dict[str, list[float]] | None = None,
    test_fraction: float = 0.2,
    hidden: list[int] | None = None,
) -> Task:
    """Your own CSV or Parquet file: one row per record, classification by a column.

    target: the column of the class (text or whole numbers). client: a column that says who holds the row. features: the
    columns to learn from; default all others. Numbers are standardised, text becomes one column per value, and a
    missing value raises a flag. scale: {column = [centre, width]} fixes the constants; without it they are computed
    from the whole file, which a real federation cannot do, so declare them there. hidden: widths of hidden layers;
    default none, which is logistic regression. Raises DataError.
    """
    file = Path(path)
    columns = read_table(file)
    wanted = [target, *([client] if client else []), *(features or [])]
    for name in wanted:
        if name not in columns:
            raise DataError(f"{file}: there is no column {name!r}: the columns are {', '.join(columns)}")
    names = features if features is not None else [name for name in columns if name not in (target, client)]
    if not names:
        raise DataError(f"{file}: no column is left to learn from")
    labels, label_names = encode_labels(columns[target], f"{file}: column {target!r}")
    keys = _client_keys(columns[client], f"{file}: column {client!r}") if client else None
    parts = [encode_column(columns[name], f"{file}: column {name!r}", (scale or {}).get(name)) for name in names]
    inputs = torch.from_numpy(np.concatenate(parts, axis=1))
    return _classification(
        "table", inputs, labels, label_names, keys, test_fraction, _dense_model(inputs, hidden, len(label_names))
    )


def arrays(
    path: str,
    inputs: str = "x",
    targets: str = "y",
    client: str | None = None,
    test_fraction: float = 0.2,
    hidden: list[int] | None = None,
) -> Task:
    """Your own NPZ file: inputs[N, ...] of numbers, targets[N] of class labels, and optionally a client key per record.

    inputs, targets, client: names of the arrays in the file. hidden: widths of hidden layers; default none, which is
    logistic regression on the flattened inputs. Raises DataError.
    """
    file = Path(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from None
    for name in (inputs, targets, *([client] if client else [])):
        if name not in found:
            raise DataError(f"{file}: there is no array {name!r}: the arrays are {', '.join(found)}")
        if len(found[name]) != len(found[inputs]):
            raise DataError(f"{file}: {name!r} has {len(found[name])} rows, {inputs!r} has {len(found[inputs])}")
    values = found[inputs]
    if values.dtype.kind not in "fiub":
        raise DataError(f"{file}: array {inputs!r} is {values.dtype}: inputs must be numbers")
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0, 0])
        raise DataError(f"{file}: array {inputs!r} is not finite in row {row}: mend or drop that record")
    labels, label_names = encode_labels(found[targets], f"{file}: array {targets!r}")
    keys = _client_keys(found[client], f"{file}: array {client!r}") if client else None
    tensor = torch.from_numpy(values)
    return _classification(
        "arrays", tensor, labels, label_names, keys, test_fraction, _dense_model(tensor, hidden, len(label_names))
    )


def images(
    path: str,
    clients: bool = False,
    size: int = 32,
    grey: bool = False,
    batch_norm: bool = False,
    test_fraction: float = 0.2,
) -> Task:
    """Your own folder of images: PATH/CLASS/*.png, or with clients = true PATH/CLIENT/CLASS/*.png.

    size: images are resized to size x size. grey: one channel in place of three. batch_norm: in the model of two
    convolutions. PNG, JPEG, BMP, GIF, TIFF and WebP are read. Raises DataError.
    """
    if size < 4:
        raise DataError(f"task.size = {size}: the model needs images of at least 4 x 4")
    pixels, classes, keys = read_images(Path(path), clients, size, grey)
    labels, label_names = encode_labels(classes, f"{path}: folders")
    model = partial(_image_model, 1 if grey else 3, size, len(label_names), batch_norm)
    return _classification("images", torch.from_numpy(pixels), labels, label_names, keys, test_fraction, model)


def encode_labels(values: NDArray[np.generic], where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class labels 0 .. C-1 and the names of the classes, in sorted order. Raises DataError naming what is wrong."""
    values = np.asarray(values)
    if values.ndim != 1:
        raise DataError(f"{where} has shape {list(values.shape)}: class labels are one value per record")
    missing = np.flatnonzero([value is None or value != value or value == "" for value in values.tolist()])
    if len(missing):
        rows = ", ".join(str(row + 1) for row in missing[:5])
        raise DataError(
            f"{where}: {len(missing)} labels are missing (record {rows}): fill them in or drop those records"
        )
    if values.dtype.kind == "f":
        if not (values == np.round(values.astype(np.float64))).all():
            raise DataError(f"{where} holds fractions: it looks like a measurement, these tasks need a class")
        values = values.astype(np.int64)
    names, labels, counts = np.unique(values.astype(str), return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise DataError(f"{where} has only the class {str(names[0])!r}: at least two are needed")
    if len(names) > min(MAX_CLASSES, len(values) // 2):
        raise DataError(f"{where} has {len(names)} different values in {len(values)} records: is it the right column?")
    if counts.min() < 2:
        raise DataError(
            f"{where}: class {str(names[counts.argmin()])!r} has a single record: two are needed to hold one out"
        )
    order = sorted(range(len(names)), key=lambda i: (0, int(names[i]), "") if _is_whole(names[i]) else (1, 0, names[i]))
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return rank[labels], tuple(str(names[i]) for i in order)


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _client_keys(values: NDArray[np.generic], where: str) -> NDArray[np.str_]:
    missing = np.flatnonzero([value is None or value != value or value == "" for value in values.tolist()])
    if len(missing):
        raise DataError(f"{where}: record {missing[0] + 1} has no client: fill it in or drop that record")
    return values.astype(str)


def _classification(
    name: str,
    inputs: torch.Tensor,
    labels: NDArray[np.int64],
    label_names: Sequence[str],
    keys: NDArray[np.str_] | None,
    test_fraction: float,
    model: "partial[nn.Module]",
) -> Task:
    if not 0 < test_fraction < 1:
        raise DataError(f"task.test_fraction = {test_fraction}: it must lie between 0 and 1")
    train, test = stratified_split([labels] if keys is None else [labels, keys], test_fraction)
    targets = torch.from_numpy(labels)
    metrics: dict[str, Metric] = {"accuracy": accuracy, "balanced_accuracy": balanced_accuracy}
    if len(label_names) == 2:
        metrics["auc"] = auc
    return Task(
        name=name,
        model=model,
        train=Records(inputs[train], targets[train], None if keys is None else keys[train]),
        test=Records(inputs[test], targets[test], None if keys is None else keys[test]),
        loss=F.cross_entropy,
        metrics=metrics,
        num_classes=len(label_names),
        label_names=tuple(label_names),
    )


def _dense_model(inputs: torch.Tensor, hidden: Sequence[int] | None, num_classes: int) -> "partial[nn.Module]":
    width = inputs[0].numel()
    if hidden:
        return partial(mlp, width, list(hidden), num_classes)
    return partial(_logistic, width, num_classes)


def _logistic(width: int, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), linear(width, num_classes))


def _image_model(channels: int, size: int, num_classes: int, batch_norm: bool) -> nn.Module:
    return FromBytes(cnn(channels, size, num_classes, batch_norm))
