"""The four texts on which no recipe was compared (docs/performance.md), from the packages that contain them.

    pip download --no-deps --no-binary zstandard zstandard==0.25.0
    pip download --no-deps vega-datasets==0.9.0 chatterbot-corpus==1.3.3
    apt-get download manpages-fr                    # 4.18.1-1 in Debian 12
    python benchmarks/untuned_texts.py .

Reads the packages in a folder, and writes zstd.txt (C code), manual.txt (French manual pages), tables.txt (lines of CSV
files, shuffled) and chat.txt (short conversations) into the working directory. Needs dpkg-deb.
"""

import argparse
import gzip
import io
import random
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import yaml

MANUAL_CHARACTERS = 3_000_000
CHARACTERS = {r"\-": "-", r"\ ": " ", r"\0": " ", r"\e": "\\", r"\\": "\\", r"\(aq": "'", r"\[aq]": "'"}
ESCAPE = re.compile(r"\\(?:f?\(..|f?\[[^]]*\]|f.|s[-+]?\d|.)")  # groff(7)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that holds the four packages")
    folder = parser.parse_args(arguments).folder
    texts = {
        "zstd": c_code(only(folder, "zstandard-*.tar.gz")),
        "manual": french_manual(only(folder, "manpages-fr_*.deb")),
        "tables": csv_lines(only(folder, "vega_datasets-*.whl")),
        "chat": conversations(only(folder, "chatterbot_corpus-*.whl")),
    }
    for name, text in texts.items():
        Path(f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}.txt: {len(text):,} characters")


def only(folder: Path, pattern: str) -> Path:
    """The file of this name in a folder. Exits if there is none, or more than one."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} must hold one file {pattern}, not {len(found)}; --help says how to get it.")
    return found[0]


def c_code(package: Path) -> str:
    """The C files of a source package."""
    with tarfile.open(package) as archive:
        return "".join(members(archive, "*.c"))


def french_manual(package: Path) -> str:
    """The first characters of the manual pages of a Debian package, as plain text."""
    files = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        pages = members(archive, "*/man/fr/*.gz")
    return "".join(map(plain_text, pages))[:MANUAL_CHARACTERS]


def plain_text(page: str) -> str:
    """A manual page in groff's language without the lines of macros and comments, and without fonts."""
    lines = [line for line in page.splitlines(keepends=True) if not line.startswith((".", "'"))]
    return ESCAPE.sub(lambda match: CHARACTERS.get(match[0], ""), "".join(lines))


def csv_lines(package: Path) -> str:
    """All lines of the CSV files of a wheel in random order."""
    lines = [line for text in wheel_files(package, "*.csv") for line in text.splitlines()]
    random.Random(0).shuffle(lines)
    return "".join(f"{line}\n" for line in lines)


def conversations(package: Path) -> str:
    """The English conversations of a wheel: a line for each utterance, and an empty line after the last."""
    files = wheel_files(package, "*/english/*.yml")
    topics = [yaml.load(text, yaml.BaseLoader)["conversations"] for text in files]  # BaseLoader: `Yes` is a text
    return "".join("".join(f"{line}\n" for line in lines) + "\n" for topic in topics for lines in topic)


def members(archive: tarfile.TarFile, pattern: str) -> list[str]:
    """The texts of the regular files whose path matches, by path. Files *.gz are decompressed."""
    texts = []
    for member in sorted(archive.getmembers(), key=lambda member: member.name):
        file = archive.extractfile(member) if member.isfile() and fnmatch(member.name, pattern) else None
        if file is not None:
            data = gzip.decompress(file.read()) if member.name.endswith(".gz") else file.read()
            texts.append(data.decode())
    return texts


def wheel_files(package: Path, pattern: str) -> list[str]:
    """The texts of the files whose path matches, by path."""
    with zipfile.ZipFile(package) as archive:
        return [archive.read(name).decode() for name in sorted(archive.namelist()) if fnmatch(name, pattern)]


if __name__ == "__main__":
    main()
