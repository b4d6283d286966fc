# SPDX-License-Identifier: Apache-2.0
"""The table and the enumerations, held against the header of every supported version.

The headers come out of NVIDIA's wheels on the package index and are kept in pytest's cache. Without a network
these tests fail; ``PBLASMP_OFFLINE=1`` skips them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

from pblasmp.bindings import FUNCTIONS, SOLVER_FUNCTIONS, GridMapping, SolverStatus
from pblasmp.bindings.enums import C_ENUMS
from tests.helpers.header import UNUSED, Header, differences, enum_differences, parse
from tests.helpers.slow import in_turn

BUILDS = {
    501: "0.5.1.65",
    600: "0.6.0.84",
    700: "0.7.0.125",
    801: "0.8.1.2360",
    901: "0.9.1.3056",
    1000: "0.10.0.3695",
}
WHEELS = {
    (cuda, v): f"nvidia-cublasmp-{cuda}=={BUILDS[v]}"
    for number, v in enumerate(BUILDS)
    for cuda in in_turn(("cu13", "cu12"), keep=2, first=number)
}
SOLVERS = {800: "nvidia-cusolvermp-cu13==0.8.0.3126", 901: "nvidia-cusolvermp-cu13==0.9.1.9318.post1"}
CUDA_RUNTIME = "nvidia-cuda-runtime==13.0.96"
SYMBOLS = "symbols.txt"

pytestmark = pytest.mark.skipif(
    os.environ.get("PBLASMP_OFFLINE") == "1", reason="PBLASMP_OFFLINE=1: no network"
)


def header_of(requirement: str) -> str:
    """The header that is kept of a wheel."""
    if requirement == CUDA_RUNTIME:
        return "library_types.h"
    return "cusolverMp.h" if requirement in SOLVERS.values() else "cublasmp.h"


def fetch(folders: Mapping[str, Path]) -> None:
    """Keep one header of each wheel and, where it has a library, the names that the library exports."""
    missing = [name for name, into in folders.items() if not (into / header_of(name)).exists()]
    if not missing:
        return
    options = "--quiet --disable-pip-version-check --no-deps --only-binary=:all:"
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014")]
    with tempfile.TemporaryDirectory() as scratch:
        command += ["--python-version=3.12", "--implementation=cp", f"--dest={scratch}", *missing]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"no wheel of {' or '.join(missing)} (PBLASMP_OFFLINE=1 skips this): {done.stderr}"
        )
        for requirement in missing:
            distribution = requirement.partition("==")[0].replace("-", "_")
            (wheel,) = Path(scratch).glob(f"{distribution}-*.whl")
            keep(wheel, header_of(requirement), folders[requirement])


def keep(wheel: Path, file: str, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in (name for name in names if name.endswith(("/libcublasmp.so.0", "/libcusolverMp.so.0"))):
            (into / SYMBOLS).write_text("\n".join(exported_names(archive.extract(name, wheel.parent))))
        (header,) = (name for name in names if name.endswith(f"include/{file}"))
        (into / file).write_bytes(archive.read(header))  # last: its presence says that all is there


def exported_names(library: str) -> list[str]:
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", library]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({line.split()[0].partition("@")[0] for line in listing.splitlines()})


def batches(requirements: Iterable[str]) -> list[list[str]]:
    """Share out the wheels among as few pips as can be: one takes no two versions of a distribution."""
    found: dict[str, list[str]] = {}
    for name in requirements:
        found.setdefault(name.partition("==")[0], []).append(name)
    return [[name for name in batch if name] for batch in zip_longest(*found.values())]


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Returns the folder with what was kept of a wheel; all are fetched at once."""
    cache = request.config.cache
    assert cache is not None
    folders = {
        name: cache.mkdir(f"pblasmp-{name}") for name in (*WHEELS.values(), *SOLVERS.values(), CUDA_RUNTIME)
    }
    jobs = {}
    with ThreadPoolExecutor(4) as pool:
        for names in batches(folders):
            jobs |= dict.fromkeys(names, pool.submit(fetch, {name: folders[name] for name in names}))

    def get(name: str) -> Path:
        jobs[name].result()
        return folders[name]

    return get


@pytest.fixture
def newest(folder: Callable[[str], Path]) -> str:
    return (folder(WHEELS["cu12", 1000]) / "cublasmp.h").read_text()


@pytest.mark.parametrize(("cuda", "version"), WHEELS)
def test_bindings_agree_with_the_header(cuda: str, version: int, folder: Callable[[str], Path]) -> None:
    header = parse((folder(WHEELS[cuda, version]) / "cublasmp.h").read_text())
    assert header.version == version
    assert differences(header) == []
    # Only the headers from 0.8.1 on say of what type the attributes are.
    assert len(header.attribute_types) == (29 if version >= 801 else 0)


@pytest.mark.parametrize(("cuda", "version"), WHEELS)
def test_library_exports_the_table(cuda: str, version: int, folder: Callable[[str], Path]) -> None:
    exported = set((folder(WHEELS[cuda, version]) / SYMBOLS).read_text().split())
    bound = {symbol for row in FUNCTIONS.values() if (symbol := row.symbol(version))}
    assert {name for name in exported - {"libcublasmp.so.0"} if not UNUSED.fullmatch(name)} == bound


@pytest.mark.parametrize("name", [name for name in C_ENUMS if name.startswith("cuda")])
def test_enumerations_of_cuda(name: str, folder: Callable[[str], Path]) -> None:
    header = parse((folder(CUDA_RUNTIME) / "library_types.h").read_text())
    assert enum_differences(header, name) == []


@pytest.mark.parametrize(
    ("old", "new", "report"),
    [
        ("cublasMpGridDestroy(", "cublasMpGridRelease(", "cublasMpGridRelease: not in the table"),
        ("cublasMpGridDestroy(", "cublasMpGridRelease(", "cublasMpGridDestroy: not in the header"),
        ("int64_t cublasMpNumroc(", "int cublasMpNumroc(", "Numroc: returns int, the table says int64_t"),
        ("Numroc(int64_t n, int64_t nb", "Numroc(int64_t n, int nb", "Numroc: argument ('int', 'nb')"),
        ("Numroc(int64_t n, int64_t nb", "Numroc(int64_t nb, int64_t n", "argument ('int64_t', 'nb')"),
        ("uint32_t isrcproc, ", "", "cublasMpNumroc: takes 4 arguments, the table says 5"),
        ("(cublasMpGrid_t grid, void* ptr)", "(cublasMpGrid_t grid, char* ptr)", "Free: argument ('char*"),
        ("(cublasMpHandle_t handle);", "(cublasMpHandle_t* handle);", "cublasMpDestroy: argument"),
        ("ForceDisable()", "ForceDisable(int now)", "cublasMpLoggerForceDisable: takes 1 arguments"),
        ("(int logLevel,", "(int64_t logLevel,", "callbacks: "),
        ("TYPE_FUSED = 6", "TYPE_FUSED = 7", "ALGO_TYPE_FUSED: 7 in the header, 6 in the bindings"),
        ("DRELU = (8 | 128)", "DRELU = (8 | 64)", "EPILOGUE_DRELU_BGRAD: 88 in the header, 152"),
        ("BGRADB = 512", "BGRADB = 512, CUBLASMP_MATMUL_EPILOGUE_X", "EPILOGUE_X: 513 in the header"),
        ("CUBLASMP_STATUS_NOT_SUPPORTED = 7,", "", "NOT_SUPPORTED: None in the header, 7 in the bindings"),
        ("} cublasMpResultScheme_t", "} cublasMpX_t", "cublasMpX_t: enumeration not in the bindings"),
        ("} cublasMpResultScheme_t", "} cublasMpX_t", "ResultScheme_t: enumeration not in the header"),
        ("Type: int32_t.", "Type: int64_t.", "SM_COUNT: its value is a int64_t, the bindings say int32_t"),
        ("VER_MINOR 10", "VER_MINOR 9", "ALGO_TYPE_FUSED: 6 in the header, None in the bindings"),
        ("VER_MINOR 10", "VER_MINOR 8", "cublasMpTrmm: not in the table"),
        ("struct cublasMpGrid;", "union cublasMpGrid;", "not understood: union cublasMpGrid;"),
    ],
)  # fmt: skip
def test_a_changed_header_is_reported(old: str, new: str, report: str, newest: str) -> None:
    assert old in newest
    found = differences(parse(newest.replace(old, new)))
    assert any(report in difference for difference in found), found


def test_every_function_is_compared(newest: str) -> None:
    header: Header = parse(newest)
    for name in FUNCTIONS:
        lacking = {other: row for other, row in header.functions.items() if other != name}
        assert differences(replace(header, functions=lacking)) == [f"{name}: not in the header"]


def c_type(text: str) -> str:
    """A C type, whether it is constant or not: a query and its routine differ in that."""
    name = text.replace("const ", "")
    return "cudaDataType_t" if name == "cudaDataType" else name


def solver_differences(header: Header, symbols: set[str], version: int) -> list[str]:
    """Every way in which the rows of cuSOLVERMp differ from a header; parameters have other names in older ones."""
    found = []
    for name, row in SOLVER_FUNCTIONS.items():
        if row.symbol(version) is None:
            found += [f"{name}: is there before"] if name in header.functions else []
            continue
        returns, parameters = header.functions.get(name, ("", []))
        types = [c_type(type_) for type_, _ in parameters]
        if returns.removesuffix("CUSOLVERAPI").strip() != row.returns:
            found.append(f"{name}: returns {returns}")
        if types != [c_type(argument.type) for argument in row.arguments]:
            found.append(f"{name}: takes {types}")
        if name not in symbols:
            found.append(f"{name}: is not exported")
    return found


@pytest.mark.parametrize("version", SOLVERS)
def test_rows_of_cusolvermp(version: int, folder: Callable[[str], Path]) -> None:
    where = folder(SOLVERS[version])
    header, symbols = parse((where / "cusolverMp.h").read_text()), {*(where / SYMBOLS).read_text().split()}
    assert not solver_differences(header, symbols, version)
    mapping = {f"CUSOLVERMP_GRID_MAPPING_{each.name}": each.value for each in GridMapping}
    assert header.enums["cusolverMpGridMapping_t"] == mapping
    name = "cusolverMpPotrs"
    returns, parameters = header.functions[name]
    header.functions[name] = returns, parameters[::-1]
    del header.functions["cusolverMpGeqrf"]
    changed = solver_differences(header, symbols - {"cusolverMpCreate"}, version)
    assert [text.split(":")[0] for text in changed] == [
        "cusolverMpCreate", name, "cusolverMpGeqrf", "cusolverMpGeqrf",
    ]  # fmt: skip
    if version > 900:
        assert "cusolverMpGesvd: is there before" in solver_differences(header, symbols, 800)
    assert SolverStatus.INTERNAL_ERROR == 7
