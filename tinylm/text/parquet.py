"""Read the rows of Parquet files, in batches, with the optional package pyarrow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinylm.errors import UsageError
from tinylm.system.files import unicode_path
from tinylm.text.compression import CHUNK_BYTES, Progress

SIGNATURE = b"PAR1"  # the first bytes of a file
BATCH_ROWS = 256  # converted to Python values at a time


def is_parquet(file: Path) -> bool:
    """Whether the name of a file has the suffix of Parquet."""
    return file.suffix.lower() == ".parquet"


def parquet_columns(file: Path) -> tuple[str, ...]:
    """The names of the columns. Errors as for `parquet_rows`."""
    with _opened(file) as table:
        return tuple(table.schema_arrow.names)


def parquet_rows(file: Path, columns: Sequence[str], progress: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location of each row, for messages, and its values in those of `columns` that the file has.

    Null values within lists and structs are left out, since Parquet fills them in. `progress` receives numbers of bytes
    in proportion to the rows read.

    Raises UsageError for a file that cannot be read, is not Parquet or has none of the columns, and if pyarrow is not
    installed.
    """
    size, done, number = file.stat().st_size, 0, 0
    with _opened(file) as table:
        names = table.schema_arrow.names
        present = [name for name in columns if name in names]
        if not present:
            found = ", ".join(map(str, names))[:200]
            advice = "name the column of the text with `text_key`" if len(columns) == 1 else "leave the file out"
            raise UsageError(f"{file}: no column {' or '.join(map(repr, columns))} (found: {found}); {advice}.")
        total = table.metadata.num_rows
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=present):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", {name: _without_nulls(value) for name, value in row.items()}
                progress(size * number // total - done)
                done = size * number // total


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value if entry is not None] if isinstance(value, list) else value


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Context manager with an open pyarrow.parquet.ParquetFile, whose errors become UsageErrors."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{file} is a Parquet file. To read it, install a package (pip install pyarrow), or convert it to JSONL."
        ) from None
    try:
        # Without pre_buffer, a column is read in chunks of buffer_size bytes, not a row group at once.
        with (
            unicode_path(file) as path,
            pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK_BYTES) as table,
        ):
            yield table
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        strerror = getattr(error, "strerror", None)
        reason = strerror or " ".join(str(error).split())[:200].rstrip(".")
        raise UsageError(f"Cannot read {file}: {reason}. Copy it again, or leave it out.") from error
