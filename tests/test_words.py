"""One meaning to a word: no two classes of the packages have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("kernels", "layers", "trainer", "experiments")


def places_of_classes(root: Path) -> dict[str, list[str]]:
    """`file:line` of each class of the packages, nested ones too, by name."""
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return places


def test_no_two_classes_have_one_name():
    places = places_of_classes(REPOSITORY)
    assert places["TrainConfig"], "the packages were read"
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert not shared, "give each class a name of its own:\n" + "\n".join(
        f"  {name}: {', '.join(where)}" for name, where in shared.items()
    )


def test_a_name_used_twice_is_found(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "kernels" / "one.py").write_text("class Window:\n    pass\n")
    (tmp_path / "trainer" / "two.py").write_text("def make():\n    class Window:\n        pass\n")
    assert places_of_classes(tmp_path) == {"Window": ["kernels/one.py:1", "trainer/two.py:2"]}
