from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from firsttoken.study import extensions, paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.yaml_text import read_yaml
from firsttoken.study.profile import load_profile, profile_names

pytestmark = pytest.mark.usefixtures("root")


@dataclass(frozen=True)
class CopyConfig:
    copy_mib: int
    disk_mib: int
    matmul_n: int
    repeats: int
    rate: float = 1.0
    blocks: tuple[int, ...] = (1, 2)
    limit: int | None = None


def test_a_section_becomes_its_dataclass_and_is_recorded_with_its_defaults() -> None:
    profile = load_profile("quick", **{"machine.repeats": 2, "machine.blocks": [4, 8]}, seed=7)
    config = profile.section("machine", CopyConfig)
    assert (config.repeats, config.blocks, profile.seed) == (2, (4, 8), 7)
    assert profile.parameters()["machine"]["rate"] == 1.0
    assert profile.parameters()["model"] == profile.model


def test_an_override_leaves_the_next_load_alone() -> None:
    load_profile("quick", **{"machine.repeats": 99})
    assert load_profile("quick").section("machine", CopyConfig).repeats != 99


def test_what_a_profile_leaves_out_is_as_in_the_one_that_it_is_like() -> None:
    quick = load_profile("quick")
    section = next(iter(quick.sections))
    (paths.PROFILES / "mine.yaml").write_text(f"like: quick\nabout: mine\n{section}: {{only: 1}}\n", encoding="utf-8")
    mine = load_profile("mine")
    assert (mine.name, mine.about, mine.model) == ("mine", "mine", quick.model)
    assert mine.sections == {**quick.sections, section: {"only": 1}}


def test_a_folder_s_sections_are_completed_by_its_defaults(tmp_path, monkeypatch) -> None:
    (tmp_path / "profiles.yaml").write_text("default:\n  s: {a: 1, b: [2]}\n  other: {a: 1}\nquick:\n  s: {a: 3}\n")
    monkeypatch.setattr(extensions, "files", lambda name: [tmp_path / name])
    sections = load_profile("quick").sections
    assert sections["s"] == {"a": 3, "b": [2]} and "other" not in sections


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quick:\n  s: {a: 1}\n\nquick:\n  s: {}\n", "line 4: the key 'quick' is there twice"),
        ("# first\nquick:\n  s: {a: *b}\n", "line 3: anchors and aliases are not read"),
        ("quick: [1]\n", "quick: expected sections"),
        ("default:\n  s: 1\n", "default: expected sections"),
        ("- quick\n", "expected a mapping"),
        ("quick:\n  s: {}\nfull: {]\n", None),
    ],
)
def test_a_folder_s_fault_names_its_file_and_line(text, said, tmp_path, monkeypatch) -> None:
    (tmp_path / "profiles.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(extensions, "files", lambda name: [tmp_path / name])
    if said is None:
        assert load_profile("quick").sections["s"] == {}, "another profile's part is not read"
        return
    with pytest.raises(ProfileError, match=rf"^{tmp_path.name}/profiles.yaml: {said}.*; mend it"):
        load_profile("quick")


def test_no_two_files_have_one_section(tmp_path, monkeypatch) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "profiles.yaml").write_text("quick:\n  s: {}\n", encoding="utf-8")
    monkeypatch.setattr(extensions, "files", lambda name: [tmp_path / folder / name for folder in ("a", "b")])
    with pytest.raises(ProfileError, match=r"^b/profiles\.yaml: quick: the section 's' is in another folder as well"):
        load_profile("quick")


def test_the_folders_name_the_profiles_that_there_are() -> None:
    for path in extensions.files("profiles.yaml"):
        content = read_yaml(path)
        assert content.keys() <= {"default", "quick", "review", "full", "gpu", "paper", "tasks"}, path
        named = {section for profile, part in content.items() if profile != "default" for section in part}
        assert content.get("default", {}).keys() <= named, path


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ("ful", "no profile 'ful'.*did you mean 'full'"),
        ("mine", "mine must hold every setting itself"),
        ("[1]", "no prof"),
    ],
)
def test_a_profile_is_like_one_that_holds_every_setting(like, said, tmp_path, monkeypatch) -> None:
    (tmp_path / "full.yaml").write_text("about: all\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(f"like: {like}\nabout: some\n", encoding="utf-8")
    monkeypatch.setattr(paths, "PROFILES", tmp_path)
    with pytest.raises(ProfileError, match=f"mine.yaml: .*{said}"):
        load_profile("mine")


def test_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_profile("quick", dtype="bfloat16").torch_dtype() is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_profile("quick", device="auto").torch_device() == torch.device("cpu")
    with pytest.raises(ProfileError, match="no CUDA device"):
        load_profile("quick", device="cuda").torch_device()


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("quik", {}, "no profile 'quik'.*did you mean 'quick'"),
        ("../quick", {}, "no profile"),
        ("quick", {"sede": 1}, "unknown key 'sede'.*did you mean 'seed'"),
        ("quick", {"machin.repeats": 1}, "no section 'machin'.*did you mean 'machine'"),
        ("quick", {"seed": "one"}, "seed: expected int, not 'one'"),
        ("quick", {"device": "gpu"}, "device: 'gpu' is not known"),
        ("quick", {"dtype": "bf16"}, "dtype: 'bf16' is not known; known: auto, bfloat16, float16, float32"),
        ("quick", {"threads": -1}, "threads: expected 0 to 1,024, not -1"),
    ],
)
def test_a_wrong_setting_is_named(name: str, overrides: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(name, **overrides)


def test_a_wrong_key_in_a_section_is_named() -> None:
    with pytest.raises(ProfileError, match=r"section machine: unknown key 'repeat'; known: .*did you mean 'repeats'"):
        load_profile("quick", **{"machine.repeat": 3}).section("machine", CopyConfig)
    with pytest.raises(ProfileError, match="no section 'distance'"):
        load_profile("quick").__class__(**_settings(sections={})).section("distance", CopyConfig)


def _settings(**changes: object) -> dict:
    fixed = {"name": "x", "about": "", "model": "", "device": "cpu", "dtype": "float32", "seed": 0, "threads": 0}
    return fixed | changes


def test_a_file_that_is_no_profile(root) -> None:
    (root / "env/profiles/bad.yaml").write_text("a: [", encoding="utf-8")
    (root / "env/profiles/bare.yaml").write_text("about: x\n", encoding="utf-8")
    assert profile_names() == ["bad", "bare", "quick"]
    with pytest.raises(ProfileError, match=r"bad.yaml: line 1: it is no YAML"):
        load_profile("bad")
    with pytest.raises(ProfileError, match="missing key 'model'"):
        load_profile("bare")
