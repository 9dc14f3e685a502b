"""Lists the packages: the face ``ernie_multi`` and the top folders mapped into the namespace ``ernie5``.

The folders keep their plain names in the repository, but ``tokenizers`` and ``kernels`` are also
distributions of others, so they are installed as ``ernie5.tokenizers`` and so on. Walking the folders
keeps a new sub-package, or a file of weights beside its code, from missing in the wheel.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
MAPPED = ("protocol", "kernels", "corpora", "tokenizers", "backbone", "services")


def packages_below(folder: Path, name: str) -> list[str]:
    """``name`` and its sub-packages: the sub-folders that have an ``__init__.py``."""
    found = [name]
    for child in sorted(folder.iterdir()):
        if (child / "__init__.py").exists():
            found += packages_below(child, f"{name}.{child.name}")
    return found


def data_below(folder: Path, top: Path) -> list[str]:
    """Data files of the package at ``top``, relative to it, with those of sub-folders that hold no code."""
    found = []
    for child in sorted(folder.iterdir()):
        if child.name.startswith((".", "__pycache__")):
            continue
        if child.is_dir() and not (child / "__init__.py").exists():
            found += data_below(child, top)
        elif child.is_file() and child.suffix not in (".py", ".so"):
            found.append(child.relative_to(top).as_posix())
    return found


package_dir = {"ernie_multi": "ernie_multi", **{f"ernie5.{folder}": folder for folder in MAPPED}}
packages = [name for root, folder in package_dir.items() for name in packages_below(ROOT / folder, root)]


def folder_of(package: str) -> Path:
    root = next(name for name in package_dir if package == name or package.startswith(f"{name}."))
    return ROOT.joinpath(package_dir[root], *package.removeprefix(root).split("."))


setup(
    packages=packages,
    package_dir=package_dir,
    package_data={name: data_below(folder_of(name), folder_of(name)) for name in packages},
)
