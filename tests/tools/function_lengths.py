"""How long functions are: lines from the head to the last one, docstring and comments included.

    python -m tests.tools.function_lengths [FOLDER ...]

Prints the number, median, 90th percentile and maximum of Python, and of C++ and CUDA, and the ten longest of each.
Decorators and a C++ comment above the head are not counted, a `template` line is; lambdas belong to what they stand in.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PYTHON = (".py",)
CPP = (".cc", ".h", ".cuh")
_NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"[{};]|\b(?:public|private|protected):")
_SCOPE = re.compile(r"(?:template\s*<.*>\s*)?(?:inline\s+)?(?:namespace|struct|class|enum|union|extern)\b", re.DOTALL)
_PARAMETERS = re.compile(r"\)[\s\w]*(?::.*)?$", re.DOTALL)


@dataclass(frozen=True)
class Function:
    """A function of a file: its first line, and how many it has."""

    path: Path
    name: str
    line: int
    lines: int


@dataclass(frozen=True)
class Summary:
    """Lengths of functions, in lines."""

    count: int
    median: float
    p90: int
    maximum: int

    @staticmethod
    def of(functions: Sequence[Function]) -> Summary:
        lengths = sorted(function.lines for function in functions)
        return Summary(len(lengths), statistics.median(lengths), lengths[len(lengths) * 9 // 10], lengths[-1])


def functions_in(folder: Path, suffixes: Sequence[str]) -> list[Function]:
    """All functions of the files of one language, the longest first."""
    read = python_functions if suffixes == PYTHON else cpp_functions
    paths = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    found = (replace(function, path=path) for path in paths for function in read(path.read_text()))
    return sorted(found, key=lambda function: -function.lines)


def python_functions(text: str) -> Iterator[Function]:
    """The functions and methods of a text, those inside of others by themselves as well."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(Path(), node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)


def cpp_functions(text: str) -> Iterator[Function]:
    """The functions with a body that stand in a namespace or a class."""
    text = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    begin, braces = 0, list[int | None]()  # for each open brace where its function's head begins; None for other braces
    for mark in _MARK.finditer(text):
        inside = any(start is not None for start in braces)
        if mark[0] == "{":
            head = text[begin : mark.start()]
            start = mark.start() - len(head.lstrip())
            braces.append(start if not inside and _is_function(head.strip()) else None)
        elif mark[0] == "}":
            opened = braces.pop()
            if opened is not None:
                lines = text.count("\n", opened, mark.start()) + 1
                yield Function(Path(), _name(text[opened:]), text.count("\n", 0, opened) + 1, lines)
        if not any(start is not None for start in braces):
            begin = mark.end()


def _is_function(head: str) -> bool:
    """Whether a brace behind this text opens a function's body."""
    return bool(_PARAMETERS.search(head)) and not (_SCOPE.match(head) and not head.endswith(")"))


def _name(text: str) -> str:
    head = re.sub(r"__launch_bounds__\([^)]*\)|__align__\([^)]*\)", "", text.split("{")[0])
    found = re.search(r"([\w~:]+|operator\W+)\s*\(", head)
    return found[1] if found else "?"


def main(folders: Sequence[str]) -> None:
    for folder in map(Path, folders or ["onnxfuse"]):
        for suffixes in (PYTHON, CPP):
            functions = functions_in(folder, suffixes)
            print(folder, *suffixes, Summary.of(functions))
            for function in functions[:10]:
                print(f"  {function.lines:3}  {function.path}:{function.line} {function.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
