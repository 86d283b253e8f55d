import json
from pathlib import Path

import pytest

from bench.engine.__main__ import BENCHMARKS, main
from bench.report import Figure, Ratio


def test_a_quick_run_prints_a_table_and_writes_what_a_result_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["host_step", "--quick", "--seed", "7", "--out", str(tmp_path)])
    table = capsys.readouterr().out
    result = json.loads((tmp_path / "host_step.json").read_text())
    assert result["environment"]["seed"] == 7
    assert result["environment"]["quick"] is True
    assert {"cpu", "cores", "threads", "commit", "date", "versions"} <= result["environment"].keys()
    assert result["conditions"]["excludes"]
    steps = [figure for figure in result["figures"] if figure["name"].endswith("rows: step")]
    assert [figure["count"] for figure in steps] == [20] * 4
    for figure in result["figures"]:
        assert figure["name"] in table
        assert figure["min"] <= figure["median"] <= figure["p99"] <= figure["max"]


def test_fairness_measures_every_disturbance_and_every_kind_of_hold(tmp_path: Path) -> None:
    main(["caller_fairness", "--quick", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "caller_fairness.json").read_text())
    names = [figure["name"] for figure in result["figures"]]
    assert sum("gap while another" in name for name in names) == 3
    assert sum("holds a loop, CPU" in name for name in names) == 3
    assert all(figure["min"] >= 0 for figure in result["figures"])


@pytest.mark.parametrize("arguments", [[], ["no_such_benchmark"]])
def test_the_command_line_says_what_can_be_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    errors = capsys.readouterr().err
    assert "no_such_benchmark" in errors if arguments else "--all" in errors
    assert set(BENCHMARKS) == {"host_step", "caller_fairness", "smollm2_vs_transformers"}


def test_figures_summarise_their_samples() -> None:
    figure = Figure.of("wait", "ms", [0.004, 0.001, 0.002], scale=1e3)
    assert (figure.median, figure.min, figure.max, figure.count) == (2, 1, 4, 3)


@pytest.mark.parametrize(
    ("ratio", "is_met"),
    [
        (Ratio("a", 1.0, 1.0), True),
        (Ratio("a", 1.2, 1.1), False),
        (Ratio("a", 2.9, 3.0, "at least"), False),
        (Ratio("a", 3.0, 3.0, "at least"), True),
        (Ratio("a", 3.0), None),
    ],
)
def test_a_ratio_knows_its_direction(ratio: Ratio, is_met: bool | None) -> None:
    assert ratio.is_met is is_met
