"""A parser of a command line that takes options by their whole names, and says which one was meant (standard library).

An abbreviation that is taken becomes another option as soon as one is added, and a secret behind ``--api-key`` would be
the name of a file.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

_NUMBER = re.compile(r"-\d+(\.\d*)?|-\.\d+")


class CommandLine(argparse.ArgumentParser):
    """Parses the options of a program, of a command or of an action.

    ``elsewhere`` holds by what an option is called in other programs either this program's option, or what stands in
    its place. Whatever is wrong with a command line is one line on standard error, and the exit status 2.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"allow_abbrev": False})
        self.elsewhere: Mapping[str, str] = {}

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse ``args`` as ArgumentParser does; unlike it, end at an option that is none, and at words too many."""
        words = list(sys.argv[1:] if args is None else args)
        if strange := next(self._strange(words[:1] if self._subparsers else words), None):
            self.error(self._meant(strange))
        options, more = super().parse_known_args(words, namespace)
        if more:
            strange = next(self._strange(more), "")
            self.error(self._meant(strange) if strange else f"{more[0]!r} is one word too many")
        return options, more

    def error(self, message: str) -> NoReturn:
        """End with one line that says what is wrong; one about a value says what is right itself."""
        more = "" if message.startswith("argument ") else f"; see `{self.prog} --help`"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}{more}\n")

    def _strange(self, words: Iterable[str]) -> Iterable[str]:
        """The options among ``words`` that this parser has not."""
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if len(word) < 2 or word[0] != "-" or " " in name or _NUMBER.fullmatch(word):
                continue
            if name not in self._option_string_actions:
                yield name

    def _meant(self, name: str) -> str:
        """Return the message about an option ``name`` that does not exist."""
        import difflib  # only where somebody mistypes

        options = [option for option in self._option_string_actions if option.startswith("--")]
        if (instead := self.elsewhere.get(name)) and (instead[:2] != "--" or instead.split()[0] in options):
            return f"no option {name}: " + (f"it is called {instead} here" if instead[:2] == "--" else instead)
        longer = [option for option in options if len(name) > 3 and option.startswith(name)]
        near = longer[:3] or difflib.get_close_matches(name[:80], options, n=1)
        return f"no option {name[:80]}" + (f"; did you mean {' or '.join(near)}?" if near else "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        from firsttoken.study.parsing.schema import unknown

        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"no {str(value)[:80]!r}; {unknown(value, map(str, action.choices))}")
