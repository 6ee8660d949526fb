"""`install`: modules and distributions with flash-attn's names, so that code which imports them runs unchanged."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import flash_attn, flash_attn_3, flash_attn_4
from .upstream import bert_padding, operators, rotary

# versions of the libraries whose functions `onepass.compat` has
VERSIONS = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0", "flash-attn-4": "4.0.0b36"}
_TOP_LEVEL = {
    "flash_attn": ("flash_attn", "flash_attn_2_cuda"),
    "flash_attn_3": ("flash_attn_3", "flash_attn_interface"),
    "flash-attn-4": ("flash_attn",),
}


def _contents() -> dict[str, dict[str, Any]]:
    """Names of modules, parents before children, and what they hold."""

    def names(module: ModuleType) -> dict[str, Any]:
        return {name: getattr(module, name) for name in module.__all__}

    interface, cute, interface_3 = names(flash_attn), names(flash_attn_4), names(flash_attn_3)
    public = {name: value for name, value in interface.items() if name.startswith("flash_attn_") and callable(value)}
    return {
        "flash_attn": {**public, "__version__": VERSIONS["flash_attn"]},
        "flash_attn.flash_attn_interface": interface,
        "flash_attn.bert_padding": names(bert_padding),
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": names(rotary),
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.rotary": {"apply_rotary": rotary.apply_rotary},
        "flash_attn.cute": {**cute, "__version__": VERSIONS["flash-attn-4"]},
        "flash_attn.cute.interface": cute,
        "flash_attn_2_cuda": vars(flash_attn.flash_attn_gpu),
        "flash_attn_3": {"__version__": VERSIONS["flash_attn_3"]},
        "flash_attn_3._C": {},
        "flash_attn_3.flash_attn_interface": interface_3,
        "flash_attn_interface": interface_3,
    }


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a distribution that has no files."""

    def __init__(self, name: str):
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSIONS[self._name]}\n"
        if filename == "top_level.txt":
            return "\n".join(_TOP_LEVEL[self._name]) + "\n"
        return None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules and distributions of an installation."""

    def __init__(self, modules: dict[str, ModuleType]):
        self.modules = modules

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        module = self.modules.get(fullname)
        return None if module is None else module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the modules are complete."""

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        for name in VERSIONS:
            if wanted is None or _normalized(wanted) == _normalized(name):
                yield _Distribution(name)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _make_modules() -> _Finder:
    contents = _contents()
    finder = _Finder({})
    for name, attributes in contents.items():
        is_package = name == "flash_attn" or any(other.startswith(f"{name}.") for other in contents)
        spec = importlib.machinery.ModuleSpec(name, finder, origin="onepass.compat", is_package=is_package)
        module = ModuleType(name)
        module.__dict__.update(attributes)
        module.__doc__ = "Computed by onepass.compat."
        module.__spec__, module.__loader__ = spec, finder
        module.__package__ = name if is_package else name.rpartition(".")[0]
        if is_package:
            module.__path__ = []
        finder.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(finder.modules[parent], child, module)
    return finder


class _Installed:
    """What an installation has put in place, and what was there before."""

    def __init__(self, replace: bool):
        top_level = dict.fromkeys(name for names in _TOP_LEVEL.values() for name in names)
        if not replace:
            for name in top_level:
                if _exists(name):
                    raise RuntimeError(
                        f"install: expected no module {name}, got one that is imported or installed; "
                        "replace=True puts onepass in its place"
                    )
        self.finder = _make_modules()
        self.replaced = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in top_level}
        for name in self.replaced:
            del sys.modules[name]
        sys.modules.update(self.finder.modules)
        sys.meta_path.insert(0, self.finder)
        _forget_answers()
        self.libraries = [operators.define_flash_attn(), operators.define_flash_attn_3()]

    def undo(self) -> None:
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        for name, module in self.finder.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self.replaced)
        _forget_answers()
        for library in self.libraries:
            if library is not None:
                library._destroy()


def _forget_answers() -> None:
    """Make Python, and transformers if it is imported, forget which modules and distributions exist."""
    importlib.invalidate_caches()
    questions = sys.modules.get("transformers.utils.import_utils")
    for name, function in list(vars(questions).items()) if questions is not None else ():
        if "flash_attn" in name or name == "_package_distribution_mapping":
            getattr(function, "cache_clear", lambda: None)()
    distributions = getattr(questions, "PACKAGE_DISTRIBUTION_MAPPING", None)  # up to transformers 5.17
    if isinstance(distributions, dict):
        distributions.clear()
        distributions.update(importlib.metadata.packages_distributions())
    loaded = sys.modules.get("transformers.modeling_flash_attention_utils")
    if loaded is not None:
        setattr(loaded, "_loaded_implementation", None)  # noqa: B010 - an attribute that the type does not declare


def _exists(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


_installed: _Installed | None = None


class Installation:
    """The result of `install`: a context manager that undoes what its call of `install` put in place."""

    def __init__(self, installed: _Installed | None):
        self._mine = installed

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._mine is not None and self._mine is _installed:
            uninstall()


def install(*, replace: bool = False) -> Installation:
    """Put modules with flash-attn's names in place, whose functions onepass computes.

    The modules are `flash_attn` (with `flash_attn_interface`, `bert_padding`, `layers.rotary`, `ops.triton.rotary` and
    `cute`), `flash_attn_interface`, `flash_attn_3.flash_attn_interface` and `flash_attn_2_cuda`. `importlib.metadata`
    finds their distributions, and `torch.ops.flash_attn` and `torch.ops.flash_attn_3` have their operators. Call this
    before importing code that looks for these modules, since it does not look again. transformers may be imported
    before: its answers are cleared. A second call changes nothing.

    Args:
        replace: take the place of modules with these names that are imported or installed.

    Returns: a context manager that undoes the call, as `uninstall` does.

    Raises: RuntimeError if a module with one of these names is imported or installed and replace is False.
    """
    global _installed
    if _installed is not None:
        return Installation(None)
    _installed = _Installed(replace)
    return Installation(_installed)


def uninstall() -> None:
    """Undo `install`: modules that were replaced are back. Without an installation this does nothing."""
    global _installed
    if _installed is not None:
        installed, _installed = _installed, None
        installed.undo()
