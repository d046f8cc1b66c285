"""Thoughts before an answer: the marks in which families write it, as data, and their reader."""

from dataclasses import dataclass

from jaxlm.server.answers.calls import overlap

_BREAKS = "\n"  # around what is thought, which are no part of it


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks before and behind what is thought; templates that show both are of such models."""

    start: str
    end: str


THOUGHTS = {
    "think": ThoughtFormat("<think>", "</think>"),  # Qwen 3, DeepSeek R1, SmolLM 3, GLM 4.5 among others
    "mistral": ThoughtFormat("[THINK]", "[/THINK]"),
}


def thoughts_of(template: str) -> ThoughtFormat | None:
    """Return the marks that a chat template shows; None where it shows none."""
    return next((each for each in THOUGHTS.values() if each.start in template and each.end in template), None)


class ReasoningParser:
    """A reader of an answer's text, piece by piece: what is thought at its beginning, and the rest.

    Args:
      is_inside: whether the answer begins behind the first mark, which its prompt ends with.
    """

    def __init__(self, form: ThoughtFormat, is_inside: bool):
        self._form, self._held, self._blank = form, "", ""
        self._state = "inside" if is_inside else "before"
        self._is_first = True  # nothing is handed out of this part yet

    @property
    def is_inside(self) -> bool:
        """True while it reads what is thought."""
        return self._state == "inside"

    def add(self, piece: str) -> tuple[str, str]:
        """Return what a piece adds to what is said, and to what is thought."""
        self._held += piece
        thought = ""
        if self._state == "before":
            begun = self._held.lstrip()
            if self._form.start.startswith(begun):  # may be the mark yet, or is nothing so far
                if begun != self._form.start:
                    return "", ""
            if begun.startswith(self._form.start):
                self._state, self._held = "inside", begun.removeprefix(self._form.start)
            else:
                self._state, self._is_first = "behind", False
        if self._state == "inside":
            at = self._held.find(self._form.end)
            if at < 0:
                kept = len(self._held) - overlap(self._held, self._form.end)
                thought, self._held = self._thought(self._held[:kept]), self._held[kept:]
                return "", thought
            thought, self._held = self._thought(self._held[:at]), self._held[at + len(self._form.end) :]
            self._state, self._is_first = "behind", True
        said, self._held = self._held, ""
        if self._is_first:
            said = said.lstrip(_BREAKS)
            self._is_first = not said
        return said, thought

    def rest(self) -> tuple[str, str]:
        """Return the end of an answer, which was held back."""
        rest, self._held = self._held, ""
        return ("", self._blank + rest) if self._state == "inside" else (rest, "")

    def _thought(self, text: str) -> str:
        """Return what is thought without the breaks at its ends: those at its end are kept until something follows."""
        text = self._blank + (text.lstrip(_BREAKS) if self._is_first else text)
        thought = text.rstrip(_BREAKS)
        self._blank = text[len(thought) :]
        self._is_first &= not thought
        return thought
