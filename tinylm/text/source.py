"""The texts that a user names, and how they are to be read."""

from dataclasses import dataclass
from typing import Any

from tinylm.config.jobs import changed_settings
from tinylm.config.settings import TextSettings
from tinylm.config.validation import check_settings, declared_settings


@dataclass(frozen=True, kw_only=True)
class TextSource(TextSettings):
    """Texts and how they are read. `paths` are files, folders and glob patterns, or - for standard input.

    `format`, `text_key`, `encoding`, `exclude`, `skip_bad` and `unknown` are the settings of the same names in a
    DataConfig. The validation text is at the path `val_data`, or else the share `val_fraction` of the text (default:
    see `split_corpus`). Conversations are rendered by `chat_template` (chatml or the path of a file; default: that
    of the model) and scored according to `train_on`. A setting that does not apply to the text is an error, unless its
    name is in `ignorable`; then it is ignored.
    """

    paths: tuple[str, ...]
    ignorable: frozenset[str] = frozenset()

    @property
    def given(self) -> dict[str, Any]:
        """The settings that differ from their defaults, by name."""
        return changed_settings(self)

    def __post_init__(self) -> None:
        check_settings(TextSettings, {name: getattr(self, name) for name in declared_settings(TextSettings)})
