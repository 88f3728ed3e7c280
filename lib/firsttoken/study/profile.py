"""Profiles: one study at several sizes, kept in ``env/profiles/<name>.yaml``.

A profile names the model and the machine settings, and holds one mapping per experiment configuration. A package beside
the library keeps those of its own experiments by its code: ``profiles.yaml`` in a folder of it holds sections under the
names of profiles, and under ``default`` what a section has where a profile's does not say otherwise. Settings and
sections that a profile leaves out are those of the profile that its key ``like`` names. Layers and adapters belong to a
model: where ``env/models.yaml`` has its name, they are those that stand there. The mapping becomes a frozen
dataclass only when an experiment asks for it, so ``study`` knows no experiment, and a key that no configuration has is
an error instead of a setting that silently does nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from firsttoken.study import dtypes, extensions, paths
from firsttoken.study.dtypes import AUTO, DTYPES
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.parse_errors import ParseError, errors_as
from firsttoken.study.parsing.schema import between, parse_as, unknown

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config")
_MEND = "mend it, or restore it from git"


@dataclass(frozen=True)
class Settings:
    """The settings that every profile has; ``threads`` counts CPU threads, 0 for all usable cores."""

    about: str
    model: str
    device: Literal["cpu", "cuda", "auto"]
    dtype: Literal[(*DTYPES, AUTO)]
    seed: Annotated[int, between(0, (1 << 32) - 1)]  # what numpy takes
    threads: Annotated[int, between(0, 1024)]


@dataclass(frozen=True)
class Profile(Settings):
    """One size of the study. ``sections`` holds the raw mapping of each experiment configuration; ``used`` collects the
    configurations that were built from it, as a result must record them."""

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    used: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def section(self, name: str, config: type[Config]) -> Config:
        """The section ``name`` as the frozen dataclass ``config``.

        Raises ProfileError when the section is absent, or for an unknown key, a missing one or a wrong type.
        """
        if name not in self.sections:
            raise ProfileError(f"profile {self.name}: no section {name!r}; {unknown(name, self.sections)}")
        built = build_config(config, self.sections[name], location=f"profile {self.name}, section {name}")
        self.used[name] = dataclasses.asdict(built)
        return built

    def parameters(self) -> dict[str, Any]:
        """The settings, ``dtype`` as it computes, and every configuration that was asked for, defaults filled in."""
        settings = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(Settings)}
        del settings["about"]
        return settings | {"dtype": self.dtype_name} | self.used

    def torch_device(self) -> torch.device:
        """The device to run on; "auto" is CUDA where there is one. Raises ProfileError for a missing CUDA device."""
        import torch

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
        """Return the name of :meth:`torch_dtype`."""
        return dtypes.name_of(self.torch_dtype())

    def stored_dtype(self) -> torch.dtype:
        """The dtype that checkpoints are written in: with "auto" the same on every machine, whatever computes there."""
        return dtypes.named(dtypes.CHECKPOINT if self.dtype == AUTO else self.dtype)


def profile_names() -> list[str]:
    """Names of the profiles that exist, sorted."""
    return sorted(path.stem for path in paths.PROFILES.glob("*.yaml"))


def load_profile(name: str, /, **overrides: Any) -> Profile:
    """Read a profile; overrides are settings (``seed=1``) or dotted keys (``**{"distance.passages": 8}``).

    With the setting ``model`` come those of ``env/models.yaml`` that belong to it, before the overrides.
    Raises ProfileError for an unknown profile, setting or section, a missing setting, or a value of the wrong type.
    """
    if name not in profile_names():
        raise ProfileError(f"no profile {name!r}; {unknown(name, profile_names())}")
    with errors_as(f"{name}.yaml", ProfileError, _MEND):
        content = _completed(_read(name))
    settings = {key: value for key, value in content.items() if not isinstance(value, dict)}
    sections = {key: dict(value) for key, value in content.items() if isinstance(value, dict)}
    if "model" in overrides:
        _settle(sections, str(overrides["model"]))
    for key, value in overrides.items():
        section, dot, option = key.partition(".")
        if dot and section not in sections:
            raise ProfileError(f"profile {name}: no section {section!r} to override; {unknown(section, sections)}")
        (sections[section] if dot else settings)[option or section] = value
    built = build_config(Settings, settings, f"profile {name}")
    return Profile(name=name, sections=sections, **vars(built))


def _read(profile: str) -> dict[str, Any]:
    """Read the file of ``profile``, with the sections that packages beside the library keep in their folders."""
    from firsttoken.study.parsing.yaml_text import read_parts, read_yaml

    content = read_yaml(paths.PROFILES / f"{profile}.yaml")
    if not isinstance(content, dict):
        raise ParseError("expected a mapping of settings and sections")
    sections = dict[str, dict[str, Any]]()
    for path in extensions.files("profiles.yaml"):
        with errors_as(f"{path.parent.name}/{path.name}", ProfileError, _MEND):
            parts = read_parts(path, ("default", profile))
            for key, part in parts.items():
                if not isinstance(part, dict) or not all(isinstance(section, dict) for section in part.values()):
                    raise ParseError(f"{key}: expected sections")
            for name, changes in parts.get(profile, {}).items():
                if name in sections:
                    raise ParseError(f"{profile}: the section {name!r} is in another folder as well")
                sections[name] = parts.get("default", {}).get(name, {}) | changes
    return sections | content


def _settle(sections: dict[str, Any], model: str) -> None:
    """Change those of ``sections`` that ``env/models.yaml`` has for ``model``."""
    from firsttoken.study.parsing.yaml_text import read_yaml

    path = paths.ENV / "models.yaml"
    with errors_as(path.name, ProfileError, _MEND):
        changes = parse_as(dict[str, dict[str, dict[str, Any]]], read_yaml(path)).get(model, {})
    for name in changes.keys() & sections.keys():
        sections[name] = sections[name] | changes[name]


def _completed(content: dict[str, Any]) -> dict[str, Any]:
    """The ``content`` of a profile, with what it leaves out as the profile named by its key ``like`` has it."""
    if "like" not in content:
        return content
    like, names = content.pop("like"), profile_names()
    if like not in names:
        raise ParseError(f"like: no profile {like!r}; {unknown(str(like), names)}")
    base = _read(like)
    if "like" in base:
        raise ParseError(f"like: {like} must hold every setting itself")
    if "model" in content:
        _settle(base, str(content["model"]))
    return base | content


def check_used(overrides: Iterable[str], used: Collection[str]) -> None:
    """Raise ProfileError for one of ``overrides`` in a section that is not among those that were ``used``."""
    for key in overrides:
        if "." in key and key.partition(".")[0] not in used:
            raise ProfileError(f"--set {key}: nothing that ran reads this section; leave it out")


def build_config(config: type[Config], values: Mapping[str, Any], location: str) -> Config:
    """A frozen dataclass from a mapping; lists become tuples. Raises ProfileError, beginning with ``location``."""
    try:
        return parse_as(config, values)
    except ParseError as error:
        raise ProfileError(f"{location}: {error}") from error
