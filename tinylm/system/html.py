"""Parts of HTML files that need no network and run no code but their own."""

import base64
import hashlib
import json
from collections.abc import Iterable
from typing import Any


def security_policy(styles: Iterable[str], scripts: Iterable[str]) -> str:
    """A content security policy that admits only elements with exactly these texts, and no network requests."""
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_hashes(styles)}; script-src {_hashes(scripts)}"
    )


def _hashes(texts: Iterable[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def encode_json(values: Any) -> str:
    """JSON for a script element: without `<`, which could end the element, `>`, `&` and characters beyond ASCII.

    Raises ValueError for NaN and infinities.
    """
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
