"""The comparison with a committed result: ratios in the same run, five percent of slack, in both directions."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from tests.perf.compare import SLOWER, compare, kernel_costs, model_costs, worse
from tests.perf.result_file import read_result, write_result

RESULTS = Path(__file__).parents[2] / "results"


def test_only_a_cost_that_grew_by_more_than_the_slack_is_told() -> None:
    before = {"same": 0.8, "noise": 0.8, "faster": 0.8, "slower": 0.8, "gone": 0.8}
    now = {"same": 0.8, "noise": 0.8 * SLOWER, "faster": 0.4, "slower": 0.8 * SLOWER + 0.01, "new": 9.0}
    assert worse(now, before) == ["slower: 0.800 -> 0.850"]


def test_a_model_costs_more_when_it_gains_less() -> None:
    result = {
        "sites": [{"m": 1, "k": 2, "n": 3, "ratio": 4.0}],
        "models": [{"model": "unet", "ratio": 1.25}],
    }
    assert model_costs(result) == {"1, 2, 3": 0.25, "unet": 0.8}
    slower = {"models": [{"model": "unet", "ratio": 1.25 / 1.06}]}
    assert worse(model_costs(slower), model_costs(result)) == ["unet: 0.800 -> 0.848"]


def test_the_committed_result_is_no_worse_than_itself(capsys: pytest.CaptureFixture[str]) -> None:
    path = RESULTS / "h200.json"
    result = json.loads(path.read_text())
    assert len(model_costs(result)) > 5
    assert not compare(result, path, model_costs)
    assert "no ratio fell" in capsys.readouterr().out
    assert not compare(result, None, model_costs)


def test_a_result_that_fell_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"rows": [{"problem": "gelu", "order": "kn", "ratio": 0.9}]}))
    assert compare({"rows": [{"problem": "gelu", "order": "kn", "ratio": 1.0}]}, before, kernel_costs)
    assert "gelu kn: 0.900 -> 1.000" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["result.json", "result.json.xz"])
def test_a_result_file_says_what_it_was_given_row_by_row(tmp_path: Path, name: str) -> None:
    rows = [{"problem": "a", "us": 1.23456789, "runs": [0.00012345678, 2]}, {"problem": "b", "us": None}]
    path = tmp_path / name
    write_result(path, {"gpu": "some", "rows": rows, "failures": []})
    assert read_result(path) == {
        "gpu": "some", "failures": [],
        "rows": [{"problem": "a", "us": 1.234568, "runs": [0.0001234568, 2]}, {"problem": "b", "us": None}],
    }  # fmt: skip
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    assert sum(line.lstrip().startswith(b'{"problem"') for line in text.splitlines()) == len(rows)
