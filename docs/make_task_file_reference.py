"""Write docs/task-file.md from the task file's schema, so that every option is documented.

python docs/make_task_file_reference.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alto_core.config import TuningTask

FILE = Path(__file__).with_name("task-file.md")
HEAD = """# The task file

A task file is YAML. Unknown fields are refused, and no value is coerced: `true` is not 1, `"8"` is not 8. Relative
paths are taken from the file's own folder. `alto validate FILE` checks a file, its data and its model without training.

Fields of `search_space` take one value or a list; a grid trains every combination.
"""


def reference() -> str:
    """The whole page as Markdown."""
    schema = TuningTask.model_json_schema()
    definitions = schema.pop("$defs")
    sections = [("Top level", schema)] + [(name, definitions[name]) for name in definitions]
    return HEAD + "".join(_section(title, content) for title, content in sections)


def _section(title: str, content: dict[str, Any]) -> str:
    required = set(content.get("required", ()))
    rows = "".join(
        f"| `{name}` | {_type(field)} | {'**required**' if name in required else _default(field)} | "
        f"{_text(field.get('description', ''))} |\n"
        for name, field in content["properties"].items()
    )
    about = _text(content.get("description", ""))
    return f"\n## {title}\n\n{about}\n\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n{rows}"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_type(option) for option in field[key]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    bounds = [
        f"{sign} {field[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field
    ]
    return f"{kind} {', '.join(bounds)}".strip()


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return "" if default is None else f"`{default}`"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
