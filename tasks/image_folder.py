"""Images from folders named after their class, and after their client where there is one."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import DataError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


def read_images(
    root: Path, clients: bool, size: int, grey: bool
) -> tuple[NDArray[np.uint8], NDArray[np.str_], NDArray[np.str_] | None]:
    """Pixels uint8[N, C, size, size], class names [N] and client keys [N] (None without clients).

    root/CLASS/*.png, or with clients root/CLIENT/CLASS/*.png. Raises DataError for no images or one that cannot be
    read, naming it.
    """
    from PIL import Image, UnidentifiedImageError

    if not root.is_dir():
        raise DataError(f"{root} is not a folder")
    files = sorted(path for path in root.glob("*/*/*" if clients else "*/*") if path.suffix.lower() in SUFFIXES)
    shape = "CLIENT/CLASS/IMAGE" if clients else "CLASS/IMAGE"
    if not files:
        raise DataError(f"{root} holds no images at {shape}: known kinds are {', '.join(sorted(SUFFIXES))}")
    pixels = np.empty((len(files), 1 if grey else 3, size, size), np.uint8)
    for row, path in enumerate(files):
        try:
            with Image.open(path) as image:
                resized = image.convert("L" if grey else "RGB").resize((size, size), Image.Resampling.BILINEAR)
                pixels[row] = np.asarray(resized).reshape(size, size, -1).transpose(2, 0, 1)
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"cannot read the image {path}: {error}: mend or remove it") from None
    classes = np.array([path.parent.name for path in files])
    return pixels, classes, np.array([path.parent.parent.name for path in files]) if clients else None
