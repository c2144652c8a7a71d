"""For mkdocstrings: the fields of a class, explained by comments beside them, as the Attributes of its docstring."""

from typing import Any

import griffe

from scalerl_jax.cli import command_help


class FieldComments(griffe.Extension):
    """Called by griffe for each class it has read."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        said = command_help.comments(cls.module.path)
        fields = [(name, said.get((cls.name, name), "")) for name, member in cls.members.items() if member.is_attribute]
        lines = [f"    {name}: {comment}" for name, comment in fields if comment]
        if lines and cls.docstring is not None and "Attributes:" not in cls.docstring.value:
            cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *lines])
