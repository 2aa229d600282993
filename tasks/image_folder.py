"""Images from folders named after their class, and after their client where there is one."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


def read_images(
    root: Path, clients: bool, size: int, grey: bool
) -> tuple[NDArray[np.uint8], NDArray[np.str_], NDArray[np.str_] | None]:
    """Pixels uint8[N, C, size, size], class names [N] and client keys [N] (None without clients).

    root/CLASS/*.png, or with clients root/CLIENT/CLASS/*.png; names that begin with a dot are passed over. Greys of 16
    bits (X-rays) keep their upper 8. Raises DataError naming the folder or the file: no images, a class with none, an
    image that cannot be read.
    """
    from PIL import Image

    if not root.is_dir():
        raise DataError(f"{root} is not a folder")
    folders = [path for path in _visible(root, "*/*" if clients else "*") if path.is_dir()]
    by_folder = {
        folder: [path for path in _visible(folder, "*") if path.suffix.lower() in SUFFIXES] for folder in folders
    }
    files = [path for paths in by_folder.values() for path in paths]
    shape, known = "CLIENT/CLASS/IMAGE" if clients else "CLASS/IMAGE", ", ".join(sorted(SUFFIXES))
    if not files:
        raise DataError(f"{root} holds no images at {shape}: known kinds are {known}")
    for folder, paths in by_folder.items():
        if not paths:
            raise DataError(f"{folder} holds no images (known kinds are {known}): remove it, or see {shape}")
    pixels = np.empty((len(files), 1 if grey else 3, size, size), np.uint8)
    for row, path in enumerate(files):
        try:
            with Image.open(path) as image:
                resized = (
                    _eight_bits(image).convert("L" if grey else "RGB").resize((size, size), Image.Resampling.BILINEAR)
                )
                pixels[row] = np.asarray(resized).reshape(size, size, -1).transpose(2, 0, 1)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # all that Pillow raises
            raise DataError(f"cannot read the image {path}: {error}: mend or remove it") from None
    classes = np.array([path.parent.name for path in files])
    return pixels, classes, np.array([path.parent.parent.name for path in files]) if clients else None


def _visible(folder: Path, pattern: str) -> list[Path]:
    paths = sorted(folder.glob(pattern))
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _eight_bits(image: "Image.Image") -> "Image.Image":
    """Scale deep greys down, which Pillow would cut off at 255 and leave white; refuse those with no fixed range."""
    from PIL import Image

    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image)
    if not image.mode.startswith("I;16") and image.format != "PNG":  # "I" is how older Pillow opens a deep PNG
        raise ValueError(f"its pixels (mode {image.mode}) are not of 8 or 16 bits, so where white lies is unknown")
    return Image.fromarray((values >> 8).astype(np.uint8))
