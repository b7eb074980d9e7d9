"""What has to agree in a release: the version, the changelog, the citation, the conda recipe and pyproject.toml."""

import importlib
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import masksafe
from masksafe.__main__ import main

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


def needed_by(python):
    """What a version of Python needs: of each package, the versions that may be installed there."""
    needed = [Requirement(text) for text in PROJECT["dependencies"]]
    needed = [requirement for requirement in needed if requirement.marker.evaluate({"python_version": python})]
    versions = {requirement.name: requirement.specifier for requirement in needed}
    assert len(versions) == len(needed)
    return versions


def sections(changelog):
    """The heading of each section, as its version and its date or None, with its text."""
    parts = re.split(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?\n", changelog, flags=re.MULTILINE)[1:]
    return [(*parts[i : i + 2], parts[i + 2].strip()) for i in range(0, len(parts), 3)]


def test_the_version_is_that_of_the_newest_section_or_comes_after_it():
    (first, _, unreleased), (newest, date, _), *_ = sections(CHANGELOG)
    number, is_coming = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev0)?", masksafe.__version__).groups()
    assert first == "Unreleased"
    assert date is not None
    if is_coming:
        assert Version(number) > Version(newest)
    else:
        assert (number, unreleased) == (newest, "")


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
    needed = {requirement.name: requirement.specifier for requirement in map(Requirement, others)}
    assert needed == needed_by(context["python_min"])  # one package for all Pythons: the oldest needs most
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
    assert of_tests["python"] == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    (oldest,) = of_tests["include"]
    floors = {name: re.findall(">=([^,]*)", str(needed)) for name, needed in needed_by(PYTHONS[0]).items()}
    assert oldest == {"python": PYTHONS[0], "pins": " ".join(f"{name}=={floor}" for name, (floor,) in floors.items())}
    assert all(f">={floor}" in str(needed_by(python)[name]) for python in PYTHONS for name, (floor,) in floors.items())


def test_a_fresh_installation_takes_no_version_at_fault_and_one_that_is_pinned_is_installed():
    for python in PYTHONS:
        runs_there = ["0.10.0", "0.10.1", "0.10.2"]
        if python != "3.11":  # which later ones do not run on
            runs_there += ["0.11.0", "0.11.1", "0.11.2", "0.12.0.1"]
        allowed = {name: list(needed.filter(runs_there)) for name, needed in needed_by(python).items()}
        assert allowed == dict.fromkeys(["jax", "jaxlib"], ["0.10.1"] if python == "3.11" else runs_there[1:])
