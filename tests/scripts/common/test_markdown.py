"""Tables in Markdown."""

from dynattn.scripts.common.markdown import aligned_table, table


def test_an_empty_heading_stays_a_column() -> None:
    assert table(["task", ""], [["copy", "0.5"]]) == "| task |  |\n| --- | --- |\n| copy | 0.5 |"


def test_columns_are_straight_and_have_a_rule_where_all_cells_are_empty() -> None:
    lines = aligned_table(["task", "", "n"], [["x", "", "12"]])
    assert lines == ["| task |  | n  |", "| ---- | - | -- |", "| x    |  | 12 |"]


def test_a_cell_with_a_bar_stays_one_cell() -> None:
    assert table(["file"], [["a|b.yaml"]]).splitlines()[-1] == r"| a\|b.yaml |"
