# SPDX-License-Identifier: Apache-2.0
"""The PBLAS names without ranks: their signatures and texts, and what the tools refuse."""

import inspect
import pydoc
import re

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from tests.helpers.prototypes import AUXILIARY, PROTOTYPES, SPECTRAL

LETTERS = {  # of the types that PBLAS has a routine for
    "gemm": "sdcz", "symm": "sdcz", "hemm": "cz", "syrk": "sdcz", "herk": "cz", "syr2k": "sdcz", "her2k": "cz",
    "trmm": "sdcz", "trsm": "sdcz", "geadd": "sdcz", "tradd": "sdcz", "tran": "sd", "tranu": "cz", "tranc": "cz",
    "gemr2d": "sdcz", "trmr2d": "sdcz", "potrf": "sdcz", "potrs": "sdcz", "posv": "sdcz",
    "dot": "sd", "dotu": "cz", "dotc": "cz", "nrm2": "sd", "cnrm2": "s", "znrm2": "d", "asum": "sd", "casum": "s",
    "zasum": "d", "amax": "sdcz", "axpy": "sdcz", "scal": "sdcz", "sscal": "c", "dscal": "z", "copy": "sdcz",
    "swap": "sdcz", "gemv": "sdcz", "symv": "sd", "hemv": "cz", "trmv": "sdcz", "trsv": "sdcz", "ger": "sd",
    "lange": "sdcz", "lansy": "sdcz", "lanhe": "cz", "lantr": "sdcz", "lacpy": "sdcz", "laset": "sdcz",
    "lascl": "sdcz", "latra": "sdcz", "elset": "sdcz", "elget": "sdcz", "laprnt": "sdcz",
    "geru": "cz", "gerc": "cz", "syr": "sd", "her": "cz", "syr2": "sd", "her2": "cz",
    "syev": "sd", "syevd": "sd", "syevr": "sd", "syevx": "sd", "sygvx": "sd", "gesvd": "sdcz",
    "heev": "cz", "heevd": "cz", "heevr": "cz", "heevx": "cz", "hegvx": "cz",
    "potri": "sdcz", "getrf": "sdcz", "getrs": "sdcz", "gesv": "sdcz", "getri": "sdcz", "trtri": "sdcz",
    "trtrs": "sdcz", "geqrf": "sdcz", "gels": "sdcz", "orgqr": "sd", "ungqr": "cz", "ormqr": "sd", "unmqr": "cz",
}  # fmt: skip
ERRORS = {"ArgumentError", "ParameterError"}
TOOLS = {"gridinit", "gridinfo", "gridexit", "descinit", "numroc", "indxg2l", "indxl2g", "indxg2p", "infog2l"}
TOOLS |= {"descset", "iceil", "ilcm", "infog1l", "blacs_pinfo", "blacs_pnum", "blacs_pcoord", "blacs_gridmap"}
TOOLS |= {"blacs_barrier", "blacs_get", "blacs_gridinit", "blacs_gridinfo", "blacs_gridexit", "blacs_exit"}


def test_every_name_is_there():
    routines = {f"p{letter}{name}" for name, letters in LETTERS.items() for letter in letters}
    assert set(pblas.__all__) == routines | TOOLS | ERRORS
    assert all(callable(getattr(pblas, name)) for name in pblas.__all__)
    assert pb.pblas is pblas


@pytest.mark.parametrize("name", LETTERS)
def test_signatures_are_those_of_pblas(name):
    known = {each[1]: text for each, text in (PROTOTYPES | AUXILIARY | SPECTRAL).items() if each[2:] == name}
    for letter in LETTERS[name]:
        alike = "sd" if letter in "sd" else "cz"  # real and complex routines may have other workspaces
        prototype = next((known[x] for x in alike if x in known), next(iter(known.values())))
        function = getattr(pblas, f"p{letter}{name}")
        assert list(inspect.signature(function).parameters) == prototype.lower().split()
        text = pydoc.plain(pydoc.render_doc(function))
        first = prototype.split()[0].lower()  # since Python 3.13 on a line of its own
        assert re.search(rf"p{letter}{name}\(\s*{first}: ", text)
        assert f"P{letter}{name}".upper() in text
        assert function.__name__ == function.__qualname__ == f"p{letter}{name}"


def test_docstrings_say_what_they_must():
    for name in set(pblas.__all__) - ERRORS:
        function = getattr(pblas, name)
        text = function.__doc__
        assert "Local." in text or "Collective over" in text, name
        arguments = text.partition("Args:")[2].partition("Raises:")[0]
        missing = [
            each for each in inspect.signature(function).parameters if f"    {each}: " not in arguments
        ]
        assert name.removeprefix("blacs_") in ("gridinfo", "gridexit") or not missing, (name, missing)


@pytest.mark.parametrize(
    ("name", "parameter", "annotation", "text"),
    [
        ("pdgemm", "m", "int", "rows of sub(C), at least 0."),
        ("pdgemm", "k", "int", "columns of op(sub(A)), at least 0."),
        ("pzherk", "n", "int", "rows and columns of sub(C), at least 0."),
        ("pdgemv", "n", "int", "columns of sub(A), at least 0."),
        ("pdgemv", "alpha", "float", "a real number."),
        ("pzdscal", "alpha", "float", "a real number."),
        ("pzscal", "alpha", "complex", "a number."),
        ("pscnrm2", "norm2", "NDArray[Any] | None", "an array of one element, in float32,"),
        ("pzdotc", "dot", "NDArray[Any] | None", "an array of one element, in complex128,"),
        ("pdamax", "indx", "NDArray[Any] | None", "an array of one integer, to which the index in all of X"),
        ("pdgels", "b", "Any", "local array of B; sub(B) is max(m, n) x nrhs."),
        ("pdgetrf", "n", "int", "columns of sub(A), at least 0."),
        ("pdgetrf", "ipiv", "Any", "an array of int32"),
        ("pdormqr", "tau", "Any", "an array of the factors of the reflectors"),
    ],
)
def test_arguments_are_described(name, parameter, annotation, text):
    function = getattr(pblas, name)
    assert inspect.signature(function).parameters[parameter].annotation == annotation
    words = " ".join(function.__doc__.split())
    assert f" {parameter}: {text}" in words


def test_docstrings_say_what_info_means():
    for name, text in {
        "pdpotrf": "INFO: 0, or i > 0: the leading minor of order i of sub(A) is not positive.",
        "pzgesv": "INFO: 0, or i > 0: the diagonal element i, from 1, of the triangular factor is exactly zero.",
        "psgeqrf": "INFO: 0.",
    }.items():
        assert text in " ".join(getattr(pblas, name).__doc__.split()), name


def test_too_few_arguments():
    with pytest.raises(TypeError, match="missing a required argument: 'transb'"):
        pblas.pdgemm("N")


@pytest.mark.parametrize(
    ("call", "arguments", "info"),
    [
        ("numroc", (-1, 2, 0, 0, 2), -1),
        ("numroc", (9, 0, 0, 0, 2), -2),
        ("numroc", (9, 2, 2, 0, 2), -3),
        ("numroc", (9, 2, 0, -1, 2), -4),
        ("numroc", (9, 2, 0, 0, 0), -5),
        ("indxg2p", (0, 2, 0, 0, 2), -1),
        ("indxg2l", (1, 0, 0, 0, 2), -2),
        ("indxg2l", (1, 2, 0, 0, 0), -5),
        ("indxl2g", (1, 2, 3, 0, 2), -3),
        ("numroc", ([9, -1], 2, 0, 0, 2), -1),
        ("numroc", (9, 2, range(3), 0, 2), -3),
        ("indxg2p", ([[1], [0]], 2, 0, 0, 2), -1),
        ("indxg2l", (np.array([1.0]), 2, 0, 0, 2), -1),
        ("indxl2g", ((1, "2"), 2, 0, 0, 2), -1),
        ("blacs_get", (-1, 10), -2),
        ("blacs_get", ("x", 0), -1),
        ("infog2l", (0, 1, [1, 0, 9, 9, 2, 2, 0, 0, 9], 1, 1, 0, 0), -1),
        ("infog2l", (1, 1, [1, 0, 9, 9, 0, 2, 0, 0, 9], 1, 1, 0, 0), -305),
        ("infog2l", (1, 1, [1, 0, 9, 9, 2, 2, 0, 1, 9], 1, 1, 0, 0), -310),
        ("infog2l", (1, 1, "desc", 1, 1, 0, 0), -3),
        ("infog2l", (1, 1, [1, 0, 9, 9, 2, 2, 0, 0, 9], 1, 1, 0, 1), -7),
        ("descinit", (-1, 9, 2, 2, 0, 0, -1, 9), -2),
        ("descinit", (9, 9, 2, 0, 0, 0, -1, 9), -5),
        ("descinit", (9, 9, 2, 2, -1, 0, -1, 9), -6),
        ("descinit", (9, 9, 2, 2, 0, 0, 12345, 9), -8),
        ("descinit", (9, 9, 2, 2, 0, 0, np.zeros(2), 9), -8),
        ("descinit", (9, 9, 2, 2, 0, 0, -1, 0), -9),
        ("descinit", (2**31, 9, 2, 2, 0, 0, -1, 9), -2),
        ("gridexit", (12345,), -1),
    ],
)
def test_tools_refuse(call, arguments, info):
    with pytest.raises(pblas.ParameterError, match=rf"(?s)^{call}: .*INFO = {info}$") as error:
        getattr(pblas, call)(*arguments)
    assert error.value.info == info


@pytest.mark.parametrize("given", [np.arange(1, 30, dtype=np.int32), [[1], [7]], range(3, 9), (), [29]])
@pytest.mark.parametrize(("nb", "iproc", "source", "nprocs"), [(1, 0, 0, 1), (2, 1, 2, 3), (5, 0, 1, 2)])
def test_index_tools_take_arrays(given, nb, iproc, source, nprocs):
    for name in ("indxl2g", "indxg2l", "indxg2p", "numroc"):
        tool = getattr(pblas, name)
        found = tool(given, nb, iproc, source, nprocs)
        expected = [tool(int(each), nb, iproc, source, nprocs) for each in np.ravel(given)]
        assert (found.dtype, found.shape) == (np.int64, np.shape(given)), name
        assert found.ravel().tolist() == expected, name
    counts = pblas.numroc(29, nb, np.arange(nprocs), source, nprocs)
    assert counts.tolist() == [pblas.numroc(29, nb, each, source, nprocs) for each in range(nprocs)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pdstebz", ["eigenvalues of reduced matrices", "ScaLAPACK's own", "docs/porting.md"]),
        ("pzheevx_", ["it is pzheevx here"]),
        ("igsum2d", ["mpi4py", "docs/porting.md"]),
        ("blacs_set", ["gridexit", "docs/porting.md"]),
        ("pdgetf2", ["on the same memory", "docs/porting.md"]),
        ("PDGEMM", ["it is pdgemm here"]),
        ("pdgemm_", ["it is pdgemm here"]),
    ],
)
def test_names_that_are_not_here_say_where_they_are(name, words):
    with pytest.raises(AttributeError) as error:
        getattr(pblas, name)
    assert all(word in str(error.value) for word in ("module 'pblasmp.pblas' has no attribute", name, *words))
    assert not hasattr(pblas, name)


def test_names_of_nothing():
    with pytest.raises(AttributeError, match=r"^module 'pblasmp.pblas' has no attribute 'nothing'$"):
        _ = pblas.nothing
