"""Functions stay short: what is counted, and the bars."""

from __future__ import annotations

from pathlib import Path

import onnxfuse
from tests.tools.function_lengths import CPP, PYTHON, Summary, cpp_functions, functions_in, python_functions

PACKAGE = Path(onnxfuse.__file__).parent

PYTHON_TEXT = '''\
class Outer:
    @property
    def short(self) -> int:
        """One line."""
        return 1

async def around(
    x: int,
) -> None:
    def inner() -> None:
        pass
'''

CPP_TEXT = """\
namespace onnxfuse {
struct Point { int x; };  // } not a function {
constexpr int kTable[] = {f(1), 2};
template <typename T>
int first(T t) {
  const auto inner = [&](int x) {
    return x ? '}' : t;
  };
  return inner(1);
}
class Held {
 public:
  explicit Held(int value) : value_(value) {}
  int value() const { return value_; }

 private:
  int value_ = f(1);
};
struct alignas(16) Words { int words[4]; };
}
extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, 1)
    kernel(const int* pointer) {
  for (;;) { break; }
}
extern "C" {
void declared(int);
void defined() { const char* text = "{"; }
}
"""


def test_python_functions_are_counted_from_the_head() -> None:
    found = {function.name: function.lines for function in python_functions(PYTHON_TEXT)}
    assert found == {"short": 3, "around": 5, "inner": 2}


def test_cpp_functions_are_found_by_their_braces() -> None:
    found = {function.name: (function.line, function.lines) for function in cpp_functions(CPP_TEXT)}
    assert found == {
        "first": (4, 7), "Held": (13, 1), "value": (14, 1), "kernel": (21, 4), "defined": (27, 1)
    }  # fmt: skip


def test_functions_of_python_are_short() -> None:
    summary = Summary.of(functions_in(PACKAGE, PYTHON))
    assert (summary.median <= 6, summary.p90 <= 15, summary.maximum <= 54) == (True, True, True), summary


def test_functions_of_cpp_and_cuda_are_short() -> None:
    summary = Summary.of(functions_in(PACKAGE, CPP))
    assert (summary.median <= 8, summary.p90 <= 22, summary.maximum <= 38) == (True, True, True), summary
