# SPDX-License-Identifier: Apache-2.0
"""The arguments of PBLAS and ScaLAPACK routines, in their order."""

A, B, C = "A IA JA DESCA", "B IB JB DESCB", "C IC JC DESCC"
PROTOTYPES = {  # of the PBLAS, REDIST and ScaLAPACK sources
    "pdgemm": f"TRANSA TRANSB M N K ALPHA {A} {B} BETA {C}",
    "pssymm": f"SIDE UPLO M N ALPHA {A} {B} BETA {C}",
    "pzhemm": f"SIDE UPLO M N ALPHA {A} {B} BETA {C}",
    "pdsyrk": f"UPLO TRANS N K ALPHA {A} BETA {C}",
    "pcherk": f"UPLO TRANS N K ALPHA {A} BETA {C}",
    "pssyr2k": f"UPLO TRANS N K ALPHA {A} {B} BETA {C}",
    "pzher2k": f"UPLO TRANS N K ALPHA {A} {B} BETA {C}",
    "pctrmm": f"SIDE UPLO TRANSA DIAG M N ALPHA {A} {B}",
    "pdtrsm": f"SIDE UPLO TRANSA DIAG M N ALPHA {A} {B}",
    "pdgeadd": f"TRANS M N ALPHA {A} BETA {C}",
    "pztradd": f"UPLO TRANS M N ALPHA {A} BETA {C}",
    "pdtran": f"M N ALPHA {A} BETA {C}",
    "pctranu": f"M N ALPHA {A} BETA {C}",
    "pztranc": f"M N ALPHA {A} BETA {C}",
    "pdgemr2d": f"M N {A} {B} ICTXT",
    "pctrmr2d": f"UPLO DIAG M N {A} {B} ICTXT",
    "pdpotrf": f"UPLO N {A} INFO",
    "pzpotrs": f"UPLO N NRHS {A} {B} INFO",
    "psposv": f"UPLO N NRHS {A} {B} INFO",
}
