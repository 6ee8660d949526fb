"""The notebook's stored outputs: whole, of one run from top to bottom, and small. `make notebook` runs it."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LARGEST_BYTES = 150_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_those_of_one_run(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}  # no error
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_small_and_names_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < LARGEST_BYTES
    assert "/home/" not in text
    assert "/tmp/" not in text


def test_there_is_a_notebook():
    assert NOTEBOOKS
