"""YAML as task files use it: plain values of bounded size, no objects, no repeated keys, YAML 1.2's numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Values of one document, those that an alias repeats counted each time: aliases of aliases can mean billions."""
MAX_INTEGER = 2**63 - 1


class YamlError(ValueError):
    """A text is no such document. Its own text says why, in one line.

    Args:
        problem: what is wrong.
        line: where, from 1; None where it is the whole.
        hint: what to do about it; empty where there is more than one cure.
    """

    def __init__(self, problem: str, *, line: int | None = None, hint: str = ""):
        self.line, self.hint = line, hint
        super().__init__(problem)


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Nothing in it is evaluated.

    Raises:
        YamlError: it is no such document.
    """
    try:
        content = yaml.load(text, Loader=_TaskLoader)  # noqa: S506 - a SafeLoader subclass
    except yaml.MarkedYAMLError as error:
        raise _at_its_line(error) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except RecursionError:
        raise YamlError("values nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # its own for a `2001-99-99` or `!!int ''`
        raise YamlError(f"a value that YAML's own types cannot hold ({error})") from None
    _check_size(content)
    return content


def line_of(text: str, keys: Sequence[int | str]) -> int | None:
    """The line, from 1, of the value at the end of these keys, or of the last of them that is there; None: none is.

    Args:
        text: a document that `read_yaml` reads.
        keys: from the outside in, for example `("search_space", "lora_rank", 1)`.
    """
    node = yaml.compose(text, Loader=_TaskLoader)
    line = None
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = [(name, value) for name, value in node.value if name.value == key]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            found = [(node.value[key], node.value[key])]
        else:
            break
        if not found:
            break
        name, node = found[0]
        line = name.start_mark.line + 1
    return line


def _at_its_line(error: yaml.MarkedYAMLError) -> YamlError:
    problem, mark, opened = str(error.problem), error.problem_mark, error.context_mark
    if mark is None:
        return YamlError(problem)
    if "\\t" in problem:
        hint = "Indent with spaces."
    elif "mapping values" in problem:
        hint = "Indent the fields of a section alike, and put a text that holds `: ` into quotes."
    elif "flow" in str(error.context) and opened is not None:
        hint = f"Look at the bracket that line {opened.line + 1} opens."
    elif "block" in str(error.context):
        hint = "Look at the quotes and the indentation of this line and of the one before it."
    else:
        hint = ""
    why = f"a line that YAML cannot read ({problem}, column {mark.column + 1})"
    return YamlError(why, line=mark.line + 1, hint=hint)


def _check_size(content: Any) -> None:
    waiting, count = [content], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise YamlError(f"more than {MAX_VALUES} values, those that aliases repeat included")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise YamlError("a whole number of more than 63 bits")


class _TaskLoader(yaml.SafeLoader):
    """YAML 1.2 numbers (`1e-4` is a number) and no repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if repr(key) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(repr(key))
        return super().construct_mapping(node, deep)


_TaskLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
