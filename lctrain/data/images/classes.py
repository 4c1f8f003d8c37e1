"""From the classes a source names to labels from 0."""

from __future__ import annotations

from lctrain.errors import DataError


class ClassNames:
    """Labels of one split's images, numbers or names, while they are copied.

    known: class names by label when they are known beforehand, else they are gathered: a name gets the next free
    number, and `order` says at the end where it belongs among the sorted names.
    title: of the source, for messages. found: of an interrupted copy, to go on with.
    """

    def __init__(self, title: str, *, known: list[str] | None, found: list[str] | int = 0) -> None:
        self._title, self._known = title, known
        self._highest = found if isinstance(found, int) else 0
        names = (found if isinstance(found, list) else []) if known is None else known
        self._numbers = {name: number for number, name in enumerate(names)}

    @property
    def found(self) -> list[str] | int:
        """What was gathered: names in the order of their first image, or how many numbers."""
        return list(self._numbers) if self._known is None and self._numbers else self._highest

    def label(self, given: int | str, place: str) -> int:
        """The number to store for an image. Raises DataError for a label outside the classes, naming `place`."""
        if isinstance(given, str):
            if self._known is None and not self._highest:
                return self._numbers.setdefault(given, len(self._numbers))
            if given in self._numbers:
                return self._numbers[given]
        elif given >= 0 and (self._known is None or given < len(self._known)):
            if self._known is None and not self._numbers:
                self._highest = max(self._highest, given + 1)
                return given
            if self._known is not None:
                return given
        raise DataError(
            f"{place} of {self._title} has label {given}, outside its classes ({self._kind()}); correct the label, or "
            "the class names"
        )

    def finish(self) -> tuple[list[str], list[int] | None]:
        """(names by label, label of each stored number or None where it is the same)."""
        if self._known is not None:
            return self._known, None
        if not self._numbers:
            return [str(number) for number in range(self._highest)], None
        names = sorted(self._numbers)
        place = {name: label for label, name in enumerate(names)}
        return names, [place[name] for name in self._numbers]

    def _kind(self) -> str:
        if self._known is not None:
            shown = ", ".join(self._known[:5]) + (", ..." if len(self._known) > 5 else "")
            return f"{len(self._known)}: {shown}"
        return "names" if self._numbers else "numbers from 0"
