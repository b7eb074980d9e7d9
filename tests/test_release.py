"""What has to agree in a release: the version, the changelog, the citation, the conda recipe and pyproject.toml."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import masksafe
from masksafe.__main__ import main

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())


def sections(changelog):
    """The heading of each section, as its version and its date or None, with its text."""
    parts = re.split(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?\n", changelog, flags=re.MULTILINE)[1:]
    return [(*parts[i : i + 2], parts[i + 2].strip()) for i in range(0, len(parts), 3)]


def disagreement(version, changelog):
    """What is wrong with a version and a changelog; None if they agree."""
    (first, _, unreleased), (newest, date, _), *_ = sections(changelog)
    number, dev = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev0)?", version).groups()
    if first != "Unreleased":
        return "no section Unreleased on top"
    if date is None:
        return "no date"
    if dev:
        is_later = [*map(int, number.split("."))] > [*map(int, newest.split("."))]
        return None if is_later else "the coming version is not later than the newest release"
    if number != newest:
        return "a version without a section"
    return "a release with unreleased changes" if unreleased else None


def test_the_version_is_that_of_the_newest_section_or_comes_after_it():
    assert disagreement(masksafe.__version__, CHANGELOG) is None


@pytest.mark.parametrize(
    ("version", "unreleased", "heading", "expected"),
    [
        ("0.3.0", "", "[0.3.0] - 2026-11-24", None),
        ("0.4.0.dev0", "- A change.", "[0.3.0] - 2026-11-24", None),
        ("0.10.0.dev0", "", "[0.9.1] - 2026-11-24", None),
        ("0.3.0.dev0", "", "[0.3.0] - 2026-11-24", "the coming version is not later than the newest release"),
        ("0.4.0", "", "[0.3.0] - 2026-11-24", "a version without a section"),
        ("0.3.0", "- A change.", "[0.3.0] - 2026-11-24", "a release with unreleased changes"),
        ("0.3.0", "", "[0.3.0]", "no date"),
    ],
)
def test_what_would_disagree(version, unreleased, heading, expected):
    changelog = f"# Changelog\n\n## [Unreleased]\n\n{unreleased}\n\n## {heading}\n\n- It works.\n"
    assert disagreement(version, changelog) == expected


def test_the_citation_is_of_the_newest_release():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    _, (newest, date, _), *_ = sections(CHANGELOG)
    assert (citation["version"], citation["date-released"]) == (newest, date)
    assert citation["license"] == PROJECT["license"]


def test_the_conda_recipe_is_of_the_newest_release_and_needs_what_the_package_needs():
    context = RECIPE["context"]
    _, (newest, *_), *_ = sections(CHANGELOG)
    assert (context["name"], context["version"]) == (PROJECT["name"], newest)
    assert PROJECT["requires-python"] == f">={context['python_min']}"
    of_python, *others = RECIPE["requirements"]["run"]
    assert of_python == "python >=${{ python_min }}"
    assert [re.sub(r" (?=[<>=])", "", other) for other in others] == PROJECT["dependencies"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {requirement.replace(" ", "") for requirement in RECIPE["requirements"]["host"]} >= set(build)
    assert RECIPE["about"]["license"] == PROJECT["license"]
    assert [RECIPE["about"]["license_file"]] == PROJECT["license-files"]
    assert PROJECT["description"].startswith(RECIPE["about"]["summary"].removesuffix("."))


def test_what_the_conda_recipe_tests_is_there():
    of_imports, of_commands = RECIPE["tests"]
    for name in of_imports["python"]["imports"]:
        importlib.import_module(name)
    (command,) = of_commands["script"]
    assert command.split()[:3] == ["python", "-m", "masksafe"]
    assert main([*command.split()[3:], "--only", "no such op"]) == 2  # the options are known, and no case has run


def test_pythons_are_those_of_the_tests():
    of_tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert classifiers == of_tests["python"]
    assert PROJECT["requires-python"] == f">={classifiers[0]}"
    (oldest,) = of_tests["include"]
    floors = [re.sub(">=([^,]*).*", r"==\1", dependency) for dependency in PROJECT["dependencies"]]
    assert oldest == {"python": classifiers[0], "pins": " ".join(floors)}


def test_versions_that_compute_wrong_sums_are_left_out():
    for dependency in PROJECT["dependencies"]:
        assert {"!=0.10.2", "!=0.11.0"} <= set(dependency.split(","))
