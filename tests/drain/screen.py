"""What a terminal would show."""


class Screen:
    """A terminal as far as this needs one: text, newline, return, and clearing from the cursor on. It is endlessly high."""

    def __init__(self, width: int = 80) -> None:
        self.width = width
        self.is_stopped = False
        self.rows = [""]
        self._row = self._column = 0

    def columns(self) -> int:
        return self.width

    def put(self, text: str) -> bool:
        if not self.is_stopped:
            self.show(text)
        return not self.is_stopped

    def show(self, text: str) -> None:
        while text:
            if text.startswith("\x1b[J"):
                self.rows = [*self.rows[: self._row], self.rows[self._row][: self._column]]
                text = text.removeprefix("\x1b[J")
                continue
            character, text = text[0], text[1:]
            assert character != "\x1b", "a sequence that nobody should send"
            if character == "\n":
                self._row += 1
                self.rows += [""] * (self._row == len(self.rows))
            elif character == "\r":
                self._column = 0
            else:
                row = self.rows[self._row].ljust(self._column)
                self.rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
                self._column += 1
