# SPDX-License-Identifier: Apache-2.0
"""Reads a C header of cuBLASMp and says where the bindings differ from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pblasmp.bindings import FUNCTIONS, MatmulAttribute
from pblasmp.bindings.enums import C_ENUMS

ENUM = re.compile(r"typedef\s+enum\s*(\w*)\s*\{(.*?)\}\s*(\w+)\s*;", re.DOTALL)
CALLBACK = re.compile(r"typedef\s+void\s*\(\s*\*\s*(\w+)\s*\)\s*\(([^()]*)\)\s*;")
OPAQUE = re.compile(r"(?:typedef\s+)?struct\s+\w+\s*(?:\*\s*\w+)?\s*;")
# What is not bound, since nothing calls it.
UNUSED = re.compile(
    r"cublasMp([GS]et\w*Emulation\w*|\w+DescriptorInit|LoggerSetFile|Trmr2D(_bufferSize)?|EmulationStrategy_t)"
)
FUNCTION = re.compile(r"([A-Za-z_][\w\s*]*?)\b(\w+)\s*\(([^()]*)\)\s*;")


@dataclass
class Header:
    """What a header declares. ``rest`` is text that was not understood."""

    version: int
    functions: dict[str, tuple[str, list[tuple[str, str]]]]
    callbacks: dict[str, list[tuple[str, str]]]
    enums: dict[str, dict[str, int]]
    attribute_types: dict[str, str] = field(default_factory=dict)
    rest: str = ""


def parse(text: str) -> Header:
    # Conditional declarations count: the library exports them whatever cuBLAS it was built with.
    major, minor, patch = (
        int(match[1]) if (match := re.search(rf"#define CUBLASMP_VER_{part} (\d+)", text)) else 0
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    commented = re.finditer(
        r"/\*\*((?:(?!\*/).)*)\*/\s*(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_\w+)", text, re.DOTALL
    )
    attribute_types = {
        constant: types[-1] for comment, constant in (m.groups() for m in commented)
        if (types := re.findall(r"Type:\s*([\w *]+)\.", comment))
    }  # fmt: skip
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#[^\n]*", "", text, flags=re.MULTILINE)

    enums = {tag or name: constants(body) for tag, body, name in ENUM.findall(text)}
    text = ENUM.sub("", text)
    callbacks = {name: arguments(body) for name, body in CALLBACK.findall(text)}
    text = OPAQUE.sub("", CALLBACK.sub("", text))
    functions = {name: (plain(returns), arguments(body)) for returns, name, body in FUNCTION.findall(text)}
    rest = " ".join(FUNCTION.sub("", text).split())
    return Header(major * 10000 + minor * 100 + patch, functions, callbacks, enums, attribute_types, rest)


def plain(c_type: str) -> str:
    return re.sub(r"\s*\*", "*", " ".join(c_type.split()))


def arguments(text: str) -> list[tuple[str, str]]:
    pairs = (re.fullmatch(r"(.*?)(\w+)", part.strip(), re.DOTALL) for part in text.split(",") if part.strip())
    return [(plain(match[1]), match[2]) for match in pairs if match]


def constants(body: str) -> dict[str, int]:
    values: dict[str, int] = {}
    following = 0
    for entry in filter(None, map(str.strip, body.split(","))):
        name, _, expression = map(str.strip, entry.partition("="))
        if expression:
            following = 0
            for term in expression.strip("() ").split("|"):
                following |= values[term.strip()] if term.strip() in values else int(term.strip(), 0)
        values[name] = following
        following += 1
    return values


def differences(header: Header) -> list[str]:
    """Return every way in which the bindings differ from a header of that version."""
    found = [f"not understood: {header.rest}"] if header.rest else []
    table = {symbol: row for row in FUNCTIONS.values() if (symbol := row.symbol(header.version))}
    more = header.functions.keys() - table.keys()
    found += [f"{name}: not in the table" for name in more if not UNUSED.fullmatch(name)]
    found += [f"{name}: not in the header" for name in table.keys() - header.functions.keys()]
    for name in table.keys() & header.functions.keys():
        returns, expected = header.functions[name]
        got = [(argument.type, argument.name) for argument in table[name].arguments]
        if table[name].returns != returns:
            found.append(f"{name}: returns {returns}, the table says {table[name].returns}")
        if len(got) != len(expected):
            found.append(f"{name}: takes {len(expected)} arguments, the table says {len(got)}")
        found += [
            f"{name}: argument {e}, the table says {g}" for e, g in zip(expected, got, strict=False) if e != g
        ]
    if header.callbacks != {
        "cublasMpLoggerCallback_t": [
            ("int", "logLevel"),
            ("const char*", "functionName"),
            ("const char*", "message"),
        ]
    }:
        found.append(f"callbacks: {header.callbacks}")
    tabled = {
        name for name in C_ENUMS if name.startswith("cublasMp") and expected_constants(name, header.version)
    }
    more = header.enums.keys() - C_ENUMS.keys()
    found += [f"{name}: enumeration not in the bindings" for name in more if not UNUSED.fullmatch(name)]
    found += [f"{name}: enumeration not in the header" for name in tabled - header.enums.keys()]
    for name in tabled & header.enums.keys():
        found += enum_differences(header, name)
    for constant, c_type in header.attribute_types.items():
        ours = MatmulAttribute.__members__.get(
            constant.removeprefix(C_ENUMS["cublasMpMatmulDescriptorAttribute_t"][1])
        )
        if ours is not None and ours.c_type != c_type:
            found.append(f"{constant}: its value is a {c_type}, the bindings say {ours.c_type}")
    return sorted(found)


IN_PART = (
    "cublasMpMatmulDescriptorAttribute_t", "cublasMpMatmulMatrixScale_t", "cublasMpResultScheme_t",
    "cublasComputeType_t", "cudaDataType_t",
)  # fmt: skip


def enum_differences(header: Header, name: str) -> list[str]:
    """Return which constants differ; of enumerations in ``IN_PART`` the bindings have only those in use."""
    expected, got = header.enums[name], expected_constants(name, header.version)
    return [
        f"{constant}: {expected.get(constant)} in the header, {got.get(constant)} in the bindings"
        for constant in (got if name in IN_PART else expected | got)
        if expected.get(constant) != got.get(constant)
    ]


def expected_constants(name: str, version: int) -> dict[str, int]:
    cls, prefix = C_ENUMS[name]
    members = cls.__members__.items()
    return {prefix + key: int(member) for key, member in members if getattr(member, "since", 0) <= version}
