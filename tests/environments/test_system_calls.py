"""The filter of system calls: its numbers are the kernel's, and what it lets through is what it should."""

import errno
import os
import pathlib
import re
import struct

import pytest

from scalerl_jax.environments.system_calls import ARCHITECTURES, CLONE, CLONE3, DENIED, NAMESPACES, filter_program

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
ALLOW, KILL = 0x7FFF0000, 0x80000000


def interpret(program: bytes, *, number: int, architecture: int, argument: int = 0) -> int:
    """What the kernel does with it: seccomp_data is number, architecture, instruction pointer, six arguments."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("=HBBI", program))
    register, at = 0, 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: register == operand, 0x35: register >= operand, 0x45: bool(register & operand)}[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_are_those_of_the_headers(machine):
    found = [path for path in HEADERS[machine] if os.path.exists(path)]
    if not found:
        pytest.skip(f"no header of {machine} here")
    pattern = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    numbers = {name: int(number) for name, number in re.findall(pattern, pathlib.Path(found[0]).read_text())}
    column = ARCHITECTURES[machine][0]
    wanted = {name: numbers[name] for name in DENIED if name in numbers}
    assert {name: DENIED[name][column] for name in wanted} == wanted
    assert {name for name in DENIED if DENIED[name][column] is None} == DENIED.keys() - numbers.keys()
    assert (CLONE[column], CLONE3) == (numbers["clone"], numbers["clone3"])


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_call_is_decided(machine):
    column, architecture = ARCHITECTURES[machine]
    program = filter_program(machine)
    denied = {numbers[column] for numbers in DENIED.values()}
    for number in range(600):
        action = interpret(program, number=number, architecture=architecture)
        if number in denied:
            assert action == 0x50000 | errno.EPERM, number
        elif number == CLONE3:
            assert action == 0x50000 | errno.ENOSYS
        else:
            assert action == ALLOW, number
    assert interpret(program, number=1, architecture=architecture ^ 1) == KILL
    assert interpret(program, number=0x40000001, architecture=architecture) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_clone_makes_processes_and_threads_and_no_namespaces(machine):
    column, architecture = ARCHITECTURES[machine]
    program = filter_program(machine)
    for flags, allowed in ((17, True), (0x003D0F00, True), *((1 << bit, False) for bit in (17, *range(25, 31)))):
        action = interpret(program, number=CLONE[column], architecture=architecture, argument=flags)
        assert (action == ALLOW) == allowed, hex(flags)
        assert allowed == (not flags & NAMESPACES)


def test_a_machine_that_is_not_known():
    with pytest.raises(ValueError, match="no system call filter for 'riscv64': the sandbox knows x86_64 and aarch64"):
        filter_program("riscv64")
