"""Extension of griffe, for the site: sections "Example:" of docstrings are shown as code, as "Examples:" are."""

from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Renames the section; griffe takes "Example:" for a note, in which ">>>" is a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
