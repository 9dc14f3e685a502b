"""Lists the packages: the face ``ernie_multi`` and the top folders mapped into the namespace ``ernie5``.

The folders keep their plain names in the repository, but ``tokenizers`` and ``kernels`` are also
distributions of others, so they are installed as ``ernie5.tokenizers`` and so on. Walking the folders
keeps a new sub-package, or a file of weights beside its code, from missing in the wheel.

With ``ERNIE_MULTI_PREBUILD=1`` the wheel also holds the C++ kernels, compiled for every variant of this
machine's architecture, and is tagged for it; without, they are compiled where they are first used.
"""

import importlib.util
import os
import platform
from pathlib import Path

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

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


PREBUILD = os.environ.get("ERNIE_MULTI_PREBUILD") == "1"


class BuildWithKernels(build_py):
    """Copies the modules and, if asked to, compiles the kernels beside them."""

    def run(self) -> None:
        super().run()
        if not PREBUILD:
            return
        source = ROOT / "kernels" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("native_build", source)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        folder = Path(self.build_lib) / "ernie5" / "kernels" / "native" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        compiler = build.find_compiler()
        machine = platform.machine()
        for variant in build.VARIANTS if machine == "x86_64" else ("portable",):
            target = folder / build.prebuilt_name(machine, variant)
            build.compile_to(target, compiler, build.compile_flags(compiler, variant))


class Distribution(setuptools.Distribution):
    """Compiled kernels make it one for a platform."""

    def has_ext_modules(self) -> bool:
        return PREBUILD


class WheelWithKernels(bdist_wheel):
    """Kernels know nothing of Python, so any Python 3 may take a wheel that holds them."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system


package_dir = {"ernie_multi": "ernie_multi", **{f"ernie5.{folder}": folder for folder in MAPPED}}
packages = [name for root, folder in package_dir.items() for name in packages_below(ROOT / folder, root)]


def folder_of(package: str) -> Path:
    root = next(name for name in package_dir if package == name or package.startswith(f"{name}."))
    return ROOT.joinpath(package_dir[root], *package.removeprefix(root).split("."))


setuptools.setup(
    distclass=Distribution,
    packages=packages,
    package_dir=package_dir,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels},
    package_data={name: data_below(folder_of(name), folder_of(name)) for name in packages},
)
