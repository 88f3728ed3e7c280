"""Profiles: one study at several sizes, kept in ``env/profiles/<name>.yaml``.

A profile names the model and the machine settings, and holds one mapping per experiment configuration. The
mapping becomes a frozen dataclass only when an experiment asks for it, so ``study`` knows no experiment, and a
key that no configuration has is an error instead of a setting that silently does nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import yaml

from firsttoken.study import dtypes, paths
from firsttoken.study.dtypes import AUTO, DTYPES
from firsttoken.study.errors import ProfileError

Config = TypeVar("Config")

DEVICES = ("cpu", "cuda", "auto")
SETTINGS = {"about": str, "model": str, "device": str, "dtype": str, "seed": int, "threads": int}


@dataclass(frozen=True)
class Profile:
    """One size of the study.

    ``threads`` counts CPU threads, 0 for all usable cores. ``sections`` holds the raw mapping of each experiment
    configuration; ``used`` collects the configurations that were built from it, as a result must record them.
    """

    name: str
    about: str
    model: str
    device: str
    dtype: str
    seed: int
    threads: int
    sections: Mapping[str, Mapping[str, Any]]
    used: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def section(self, name: str, config: type[Config]) -> Config:
        """The section ``name`` as the frozen dataclass ``config``.

        Raises ProfileError when the section is absent, or for an unknown key, a missing one or a wrong type.
        """
        if name not in self.sections:
            raise ProfileError(f"profile {self.name}: no section {name!r}; {unknown(name, self.sections)}")
        built = build_config(config, self.sections[name], where=f"profile {self.name}, section {name}")
        self.used[name] = dataclasses.asdict(built)
        return built

    def parameters(self) -> dict[str, Any]:
        """The settings, ``dtype`` as it computes, and every configuration that was asked for, defaults filled in."""
        settings = {key: getattr(self, key) for key in SETTINGS if key != "about"}
        return settings | {"dtype": self.dtype_name} | self.used

    def torch_device(self) -> torch.device:
        """The device to run on; "auto" is CUDA where there is one. Raises ProfileError for a missing CUDA device."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ProfileError(f"profile {self.name} asks for CUDA and torch sees no CUDA device; try --profile quick")
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def torch_dtype(self) -> torch.dtype:
        """The dtype that computes; "auto" is the one that the device is fastest at."""
        return dtypes.resolve(self.dtype, self.torch_device())

    @property
    def dtype_name(self) -> str:
        """The name of :meth:`torch_dtype`."""
        return dtypes.name_of(self.torch_dtype())

    def stored_dtype(self) -> torch.dtype:
        """The dtype that checkpoints are written in: with "auto" the same on every machine, whatever computes there."""
        return DTYPES[dtypes.CHECKPOINT if self.dtype == AUTO else self.dtype]


def profile_names() -> list[str]:
    """Names of the profiles that exist, sorted."""
    return sorted(path.stem for path in paths.PROFILES.glob("*.yaml"))


def load_profile(name: str, **overrides: Any) -> Profile:
    """Read a profile; overrides are settings (``seed=1``) or dotted keys (``**{"distance.passages": 8}``).

    Raises ProfileError for an unknown profile, setting or section, a missing setting, or a value of the wrong type.
    """
    if name not in profile_names():
        raise ProfileError(f"no profile {name!r}; {unknown(name, profile_names())}")
    path = paths.PROFILES / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ProfileError(f"{path.name}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ProfileError(f"{path.name}: expected a mapping of settings and sections")
    settings = {key: value for key, value in content.items() if not isinstance(value, dict)}
    sections = {key: dict(value) for key, value in content.items() if isinstance(value, dict)}
    for key, value in overrides.items():
        section, dot, option = key.partition(".")
        if dot and section not in sections:
            raise ProfileError(f"profile {name}: no section {section!r} to override; {unknown(section, sections)}")
        (sections[section] if dot else settings)[option or section] = value
    for key in settings:
        if key not in SETTINGS:
            raise ProfileError(f"profile {name}: unknown key {key!r}; {unknown(key, [*SETTINGS, *sections])}")
    for key, kind in SETTINGS.items():
        if key not in settings:
            raise ProfileError(f"profile {name}: missing key {key!r}")
        settings[key] = _coerce(settings[key], kind, f"profile {name}, key {key}")
    for key, allowed in (("device", DEVICES), ("dtype", (*DTYPES, AUTO))):
        if settings[key] not in allowed:
            raise ProfileError(f"profile {name}: unknown {key} {settings[key]!r}; {unknown(settings[key], allowed)}")
    if settings["threads"] < 0:
        raise ProfileError(f"profile {name}: threads must be 0 (all cores) or more, not {settings['threads']}")
    return Profile(name=name, sections=sections, **settings)


def build_config(config: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """A frozen dataclass from a mapping; lists become tuples. Raises ProfileError, beginning with ``where``."""
    hints = typing.get_type_hints(config)
    fields = {entry.name: entry for entry in dataclasses.fields(config)}
    for key in values:
        if key not in fields:
            raise ProfileError(f"{where}: unknown key {key!r}; {unknown(str(key), fields)}")
    for key, entry in fields.items():
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and key not in values:
            raise ProfileError(f"{where}: missing key {key!r}")
    return config(**{key: _coerce(value, hints[key], f"{where}, key {key}") for key, value in values.items()})


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the type ``hint``: int, float, bool, str, tuples of these, unions; anything else passes as it is."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            try:
                return _coerce(value, option, where)
            except ProfileError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(_coerce(item, kind, where) for item, kind in zip(value, kinds, strict=True))
    elif hint is float and not isinstance(value, bool):
        try:  # YAML reads 1e-4, without a dot, as text
            return float(value)
        except (TypeError, ValueError):
            pass
    elif hint is int and isinstance(value, bool):
        pass
    elif not isinstance(hint, type) or isinstance(value, hint):
        return value
    raise ProfileError(f"{where}: expected {getattr(hint, '__name__', hint)}, not {value!r}")


def unknown(name: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: what exists, and what was probably meant."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"known: {', '.join(names) or 'none'}" + (f" (did you mean {nearest[0]!r}?)" if nearest else "")
