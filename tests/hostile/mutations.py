"""A valid protobuf message made wrong: in the values of its fields, or in the bytes that stand for it.

    spoil(message, rng)   one to three fields set to what nobody expects; the result still decodes
    damage(data, rng)     bits, lengths and text of the encoded message; the result mostly does not decode

Both are functions of the message and of the random numbers alone.
"""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-40, 1e-30, 3.4e38, -3.4e38, 0.999999)
TEXTS = (
    "",
    "\n",
    "\0",
    "a\r\nW1122 00:00:00 forged.py:1] all is well\n",
    "\x1b[2J",
    "é\u202e" * 50,
    "../" * 30,
    "x" * 1_000,
)
LONG_TEXT = "y" * 300_000

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_MOST_COPIES = 2_000


def spoil(message: Message, rng: random.Random) -> tuple[Message, str]:
    """(a copy with one to three fields changed, what was changed)."""
    out = type(message)()
    out.CopyFrom(message)
    said = [_spoil_one(out, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return out, ", ".join(said)


def _spoil_one(message: Message, rng: random.Random) -> str:
    owner, field = _pick(message, rng)
    name = f"{owner.DESCRIPTOR.name}.{field.name}"
    if field.is_repeated:
        return f"{name} {_spoil_repeated(getattr(owner, field.name), field, rng)}"
    if rng.random() < 0.1 or field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        owner.ClearField(field.name)
        return f"{name} left out"
    value = _value(field, rng)
    setattr(owner, field.name, value)
    return f"{name} = {_short(value)}"


def _pick(message: Message, rng: random.Random) -> tuple[Message, FieldDescriptor]:
    """A field of the message or of one inside it."""
    while True:
        field = rng.choice(message.DESCRIPTOR.fields)
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE or rng.random() < 0.2:
            return message, field
        inside = getattr(message, field.name)
        if field.is_repeated:
            if not inside:
                return message, field
            message = rng.choice(inside)
        else:
            message = inside
        if not message.DESCRIPTOR.fields:
            return message, field


def _spoil_repeated(items: Any, field: FieldDescriptor, rng: random.Random) -> str:
    act = rng.choice(("cleared", "doubled", "many", "value"))
    if act == "cleared" or (not items and field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE):
        del items[:]
        return "cleared"
    if act == "value" and field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        items.append(_value(field, rng))
        return f"+ {_short(items[-1])}"
    copies = 1 if act == "doubled" else rng.choice((10, 100, _MOST_COPIES))
    first = items[0] if items else _value(field, rng)
    room = max(1, 2**22 // max(1, first.ByteSize() if isinstance(first, Message) else 8))
    items.extend([first] * min(copies, room))
    return f"x {len(items)}"


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return rng.choice([n for n in INTEGERS if low <= n <= high])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 3, 99, -1, 2**31 - 1))
    if field.type == FieldDescriptor.TYPE_STRING:
        return LONG_TEXT if rng.random() < 0.02 else rng.choice(TEXTS)
    assert field.type == FieldDescriptor.TYPE_BYTES, field.full_name
    if rng.random() < 0.02:
        return rng.randbytes(rng.choice((2**16, 2**20)) + rng.randrange(5))
    # Whole int32s and parts of one; values that are small, negative and huge.
    return rng.choice((b"\x07\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\0\0\0\0")) * rng.choice(
        (0, 1, 3, 200)
    ) + rng.randbytes(rng.choice((0, 0, 1, 2, 3)))


def damage(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """(the bytes with one kind of damage, which)."""
    what = rng.choice(("bits", "cut", "inserted", "text", "length", "unknown fields", "nested groups", "twice"))
    out = bytearray(data or b"\x0a\x00")
    if what == "bits":
        for _ in range(rng.randint(1, 8)):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif what == "cut":
        del out[rng.randrange(len(out)) :]
    elif what == "inserted":
        at = rng.randrange(len(out) + 1)
        out[at:at] = rng.randbytes(rng.randint(1, 20))
    elif what == "text":  # not UTF-8, where the first field of many of these messages is text
        out += b"\x12\x04\xff\xfe\xc3\x28" if rng.random() < 0.5 else b"\x0a\x02\xc0\xaf"
    elif what == "length":  # of more than there is
        out += b"\x12" + rng.choice((b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\x7f"))
    elif what == "unknown fields":
        out += b"\xfa\x7f\x05other" * rng.choice((1, 50, 5_000))
    elif what == "nested groups":
        out += b"\x0b" * rng.choice((1, 200, 20_000))
    else:
        out += bytes(out)
    return bytes(out), what


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:30]}... ({len(value)})"
