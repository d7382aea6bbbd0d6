"""YAML as task files use it: plain values of bounded size, no objects, no repeated keys, YAML 1.2's numbers."""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Values of one document, those that an alias repeats counted each time: aliases of aliases can mean billions."""
MAX_INTEGER = 2**63 - 1


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Nothing in it is evaluated.

    Raises:
        ValueError: it is no such document; the text says where and why, in one line.
    """
    try:
        content = yaml.load(text, Loader=_TaskLoader)  # noqa: S506 - a SafeLoader subclass
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # its own for a `2001-99-99` or `!!int ''`
        raise ValueError(f"a value that YAML's own types cannot hold ({error})") from None
    _check_size(content)
    return content


def _check_size(content: Any) -> None:
    waiting, count = [content], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, those that aliases repeat included")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError("a whole number of more than 63 bits")


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
