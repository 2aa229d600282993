"""A user's own records with no code: a table (CSV, Parquet), arrays (NPZ) or a folder of images, for classification.

    coterie simulate --task table --set task.path=patients.csv --set task.target=ill --set task.client=hospital

Every mistake in the data is a DataError that names the file, the column and the record (the first is record 1: in a CSV
file with a header it stands in line 2); a wrong option is a ConfigError.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from coterie.core.errors import ConfigError, DataError
from coterie.tasks.image_folder import read_images
from coterie.tasks.labels import encode_clients, encode_labels
from coterie.tasks.metrics import accuracy, auc, balanced_accuracy
from coterie.tasks.models import FromBytes, cnn, linear, mlp
from coterie.tasks.splits import stratified_split
from coterie.tasks.tables import encode_column, read_table, values_of
from coterie.tasks.task import Metric, Records, Task

MAX_IMAGE_SIZE = 1024
MAX_LAYERS, MAX_WIDTH = 32, 65536


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
    default none, which is logistic regression. Raises DataError and ConfigError.
    """
    file = Path(path)
    columns = read_table(file)
    for name in [target, *([client] if client else []), *(features or []), *(scale or {})]:
        if name not in columns:
            raise DataError(f"{file}: there is no column {name!r}: the columns are {', '.join(columns)}")
    names = features if features is not None else [name for name in columns if name not in (target, client)]
    _check_roles(file, target, client, names, scale or {})
    where = {name: f"{file}: column {name!r}" for name in columns}
    labels, label_names = encode_labels(values_of(columns[target], where[target], exact=True), where[target])
    keys = encode_clients(values_of(columns[client], where[client], exact=True), where[client]) if client else None
    parts = [
        encode_column(values_of(columns[name], where[name]), where[name], (scale or {}).get(name)) for name in names
    ]
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
    logistic regression on the flattened inputs. Raises DataError and ConfigError.
    """
    file = Path(path)
    found = _read_arrays(file, [inputs, targets, *([client] if client else [])])
    values = found[inputs]
    for name, array in found.items():
        if array.ndim == 0 or len(array) == 0:
            raise DataError(f"{file}: array {name!r} has no records (its shape is {list(array.shape)})")
        if len(array) != len(values):
            raise DataError(f"{file}: {name!r} has {len(array)} rows, {inputs!r} has {len(values)}")
    if values.dtype.kind not in "fiub":
        raise DataError(f"{file}: array {inputs!r} is {values.dtype}: inputs must be numbers")
    if values.size == 0:
        raise DataError(f"{file}: array {inputs!r} of shape {list(values.shape)} holds no numbers")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32).reshape(len(values), *(values.shape[1:] or (1,)))
    finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0]) + 1
        raise DataError(f"{file}: array {inputs!r}: record {row} is not finite in float32: mend or drop that record")
    labels, label_names = encode_labels(found[targets], f"{file}: array {targets!r}")
    keys = encode_clients(found[client], f"{file}: array {client!r}") if client else None
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
    convolutions. PNG, JPEG, BMP, GIF, TIFF and WebP are read, kept as bytes and made numbers by the model. Raises
    DataError and ConfigError.
    """
    if not 4 <= size <= MAX_IMAGE_SIZE:
        raise ConfigError(f"task.size = {size}: images are kept at 4 x 4 to {MAX_IMAGE_SIZE} x {MAX_IMAGE_SIZE} pixels")
    pixels, classes, keys = read_images(Path(path), clients, size, grey)
    labels, label_names = encode_labels(classes, f"{path}: folders")
    model = partial(_image_model, 1 if grey else 3, size, len(label_names), batch_norm)
    return _classification("images", torch.from_numpy(pixels), labels, label_names, keys, test_fraction, model)


def _check_roles(
    file: Path, target: str, client: str | None, features: Sequence[str], scale: Mapping[str, list[float]]
) -> None:
    """Raise ConfigError when the options give one column two roles, or none where one is needed."""
    if not features:
        raise ConfigError(f"task.features: no column of {file} is left to learn from")
    if client == target:
        raise ConfigError(f"task.client = {client!r}: that is the target; name the column that says who holds the row")
    if target in features:
        raise ConfigError(f"task.features has {target!r}, which is the target: the model would read the answer")
    for name in features:
        if features.count(name) > 1:
            raise ConfigError(f"task.features has {name!r} twice")
    for name in scale:
        if name not in features:
            raise ConfigError(f"task.scale has {name!r}, which is none of the features")


def _read_arrays(file: Path, names: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    try:
        with file.open("rb") as stream:
            if stream.read(2) != b"PK":
                raise DataError(f"{file} is not an NPZ file: write one with numpy.savez(path, x=..., y=...)")
        with np.load(file, allow_pickle=False) as archive:
            for name in names:
                if name not in archive.files:
                    raise DataError(f"{file}: there is no array {name!r}: the arrays are {', '.join(archive.files)}")
            return {name: archive[name] for name in names}
    except (OSError, ValueError, EOFError, BadZipFile, ZlibError) as error:
        raise DataError(f"cannot read {file}: {error}") from None


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
        raise ConfigError(f"task.test_fraction = {test_fraction}: it must lie between 0 and 1")
    train, test = stratified_split([labels] if keys is None else [labels, keys], test_fraction)
    if not (len(train) and len(test)):
        raise ConfigError(
            f"task.test_fraction = {test_fraction}: of {len(labels)} records it holds out {len(test)}: "
            "records are needed on both sides"
        )
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
    if not hidden:
        return partial(_logistic, width, num_classes)
    if len(hidden) > MAX_LAYERS:
        raise ConfigError(f"task.hidden has {len(hidden)} layers: {MAX_LAYERS} are the most")
    if any(not 1 <= size <= MAX_WIDTH for size in hidden):
        raise ConfigError(f"task.hidden = {list(hidden)}: a layer is at least 1 and at most {MAX_WIDTH} wide")
    return partial(mlp, width, list(hidden), num_classes)


def _logistic(width: int, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), linear(width, num_classes))


def _image_model(channels: int, size: int, num_classes: int, batch_norm: bool) -> nn.Module:
    return FromBytes(cnn(channels, size, num_classes, batch_norm))
