"""Options of the fault tests, and their table."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="of each class of faults, at most (default: a few)")
    parser.addoption("--seed", type=int, default=0, help="of the cases of fault tests (default: 0)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    found = [value for report in reports for name, value in report.user_properties if name == "faults"]
    if found:
        terminalreporter.write_line("| class of fault | cases | survived | minutes |\n|---|---:|---:|---:|")
    for name in dict.fromkeys(row[0] for row in found):
        cases, survived, seconds = (sum(row[column] for row in found if row[0] == name) for column in (1, 2, 3))
        terminalreporter.write_line(f"| {name} | {cases} | {survived} | {seconds / 60:.1f} |")
