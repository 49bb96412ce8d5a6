"""The row of the job, added to the table before anything else is imported; then tinylm's command line.

python -m tests.jobs.regression.row train texts.jsonl
"""

from tinylm.config.jobs import JOBS, JobRow

JOBS["regression"] = JobRow(
    name="regression",
    data="numbers",
    noun="texts with numbers",
    records="texts",
    architectures=("encoder", "decoder"),
    unit="squared error",
    has_labels=True,
    command="",
    prompt="",
    file="numbers.jsonl",
    module="tests.jobs.regression.job",
)

if __name__ == "__main__":
    from tinylm.__main__ import main

    main()
