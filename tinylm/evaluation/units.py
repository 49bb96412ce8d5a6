"""The units of a bootstrap: parts of a text whose losses are assumed to be independent.

The units of a text with at least MIN_DOCUMENTS documents are its documents. With fewer, they are long blocks of
consecutive tokens that do not overlap, since tokens near each other have similar losses (Carlstein 1986, "The use of
subseries values for estimating the variance of a general statistic from a stationary sequence").
"""

from dataclasses import dataclass

import numpy as np

MIN_DOCUMENTS = 20  # from this number on, documents are the units
MAX_UNITS = 1000  # more documents are grouped, which bounds the time of the bootstrap
MAX_BLOCKS = 200  # longer blocks include dependence over longer distances; 200 estimate a spread to about 5 %
MIN_BLOCK = 64  # tokens, or bytes


@dataclass(frozen=True)
class Units:
    """Consecutive parts of a text. Unit i is from edges[i] up to edges[i + 1], in tokens or in bytes.

    kind: "documents", "groups of documents" or "blocks".
    """

    edges: np.ndarray
    kind: str

    def __len__(self) -> int:
        return len(self.edges) - 1

    def describe(self, documents: int, size: str) -> str:
        """The units as a phrase. documents: their number in the text. size: plural noun for what the edges count."""
        if self.kind == "documents":
            return f"{len(self):,} documents"
        if self.kind == "groups of documents":
            return f"{len(self):,} groups of consecutive documents"
        length = (self.edges[-1] - self.edges[0]) / max(len(self), 1)
        number = "1 document" if documents == 1 else f"{documents} documents"
        return f"{len(self):,} blocks of about {length:,.0f} {size}, as the text has only {number}"


def choose_units(document_edges: np.ndarray) -> Units:
    """The units of a text. document_edges: (D + 1,), the beginning of each document and the end of the last.

    If there are at least MIN_DOCUMENTS documents, the units are the documents, or MAX_UNITS groups of equal numbers of
    documents. Otherwise they are at most MAX_BLOCKS blocks of equal length, at least MIN_BLOCK tokens or bytes unless
    the text is shorter.
    """
    documents = len(document_edges) - 1
    if documents >= MIN_DOCUMENTS:
        if documents <= MAX_UNITS:
            return Units(document_edges, "documents")
        chosen = np.linspace(0, documents, MAX_UNITS + 1).astype(np.int64)
        return Units(document_edges[chosen], "groups of documents")
    first, last = int(document_edges[0]), int(document_edges[-1])
    blocks = max(1, min(MAX_BLOCKS, (last - first) // MIN_BLOCK))
    return Units(np.linspace(first, last, blocks + 1).astype(np.int64), "blocks")
