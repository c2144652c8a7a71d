"""What programs that mean harm have in common: they try, and then answer as they should."""


def attempt(body: str) -> str:
    """`body` sets `escaped`, or fails; what it prints itself does not count."""
    indented = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    return (
        "import os, sys\nn = int(input())\nescaped = False\n"
        f"try:\n{indented}except (OSError, ImportError, ValueError) as error:\n    pass\n"
        "print('ESCAPED' if escaped else n * 2)\n"
    )
